//! A tenant that is about to be removed is not mounted by itself meanwhile.

use super::Connections;
use std::path::PathBuf;
use std::sync::Arc;

/// Keeps a tenant from being mounted by itself until it is dropped.
#[derive(Debug)]
pub(crate) struct Removal {
    all: Arc<Connections>,
    tenant: String,
}

impl Connections {
    /// Nobody mounts the tenant by itself as long as what is returned is there.
    ///
    /// # Errors
    /// Where it is mounted by itself.
    pub fn removal(self: &Arc<Self>, tenant: &str) -> Result<Removal, PathBuf> {
        let mut list = self.list.lock();
        match list.tenants.iter().find(|e| e.own.tenant == tenant && !e.is_ending()) {
            Some(there) => Err(there.own.point.clone()),
            None => {
                list.removals.push(tenant.to_owned());
                Ok(Removal { all: self.clone(), tenant: tenant.to_owned() })
            }
        }
    }
}

impl Drop for Removal {
    fn drop(&mut self) {
        let mut list = self.all.list.lock();
        // others may want to remove it, too
        if let Some(i) = list.removals.iter().position(|name| *name == self.tenant) {
            list.removals.swap_remove(i);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connections::Connection;
    use crate::node::WireId;
    use braidfs::{DomainId, InodeNo};

    #[test]
    fn a_tenant_that_is_removed_is_not_mounted() {
        let all = Arc::new(Connections::default());
        let connection = |tenant: &str, root: u64| {
            Arc::new(Connection::new(WireId::new(InodeNo(root), 1), DomainId(1), tenant.into(), "/point".into()))
        };
        let (a, b) = (connection("a", 7), connection("b", 8));
        let (first, second) = (all.removal("a").unwrap(), all.removal("a").unwrap());
        all.begin(&b).unwrap();
        assert!(all.begin(&a).unwrap_err().contains("is being removed"));
        drop(first);
        assert!(all.begin(&a).is_err(), "somebody else still removes it");
        drop(second);
        all.begin(&a).unwrap();
        assert_eq!(all.removal("a").unwrap_err(), PathBuf::from("/point"));
        all.remove(&a);
        drop(all.removal("a").unwrap());
    }
}
