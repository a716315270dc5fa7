//! What recovery finds, for those who only look: inodes, entries, and the names that synced inodes had.

use crate::cell::{Cell, name_hash};
use crate::domain::recovered::{Claim, Forwarded};
use crate::error::{Error, Result};
use crate::types::*;
use crate::volume::MountedVolume;
use braidfs_format::dentry::Dentry;
use braidfs_format::inode::Link;
use braidfs_sync::plain::Mutex;
use std::sync::Arc;

/// Inodes that one thread has loaded before another has started.
pub(super) const FEW_INODES: usize = 64;

/// Which inodes had a name by a roll-forward record, and when: by the domain of the directory, in the order of directories and
/// names.
#[derive(Default)]
pub(super) struct Claims<'a>(Vec<Vec<&'a Claim>>);

impl<'a> Claims<'a> {
    /// Sorted by several threads, of which each has the claims on some domains.
    pub fn of(mounted: &MountedVolume, claims: &'a [Vec<Claim>]) -> Result<Self> {
        let mut by_domain: Vec<Vec<&Claim>> = vec![Vec::new(); mounted.domains.len()];
        for c in claims.iter().flatten() {
            by_domain[mounted.place_of(c.link.parent)].push(c);
        }
        let grain = if by_domain.iter().any(|c| c.len() >= FEW_INODES) { 1 } else { by_domain.len() };
        let by_domain: Vec<Mutex<_>> = by_domain.into_iter().map(Mutex::new).collect();
        let sorted = |i: usize| {
            let mut claims: Vec<&Claim> = std::mem::take(&mut *by_domain[i].lock());
            claims.sort_by(|a, b| (a.link.parent, &a.link.name[..]).cmp(&(b.link.parent, &b.link.name[..])));
            Ok::<_, Error>(claims)
        };
        mounted.shared.workers.each(by_domain.len(), grain, sorted).map(Self)
    }

    /// Those on `name` in `dir`, of which `place` is the domain's.
    fn on(&self, place: usize, dir: InodeNo, name: &[u8]) -> impl Iterator<Item = &'a Claim> {
        let claims = self.0.get(place).map_or(&[][..], |c| c);
        let from = claims.partition_point(|c| (c.link.parent, &c.link.name[..]) < (dir, name));
        claims[from..].iter().copied().take_while(move |c| c.link.parent == dir && c.link.name[..] == *name)
    }
}

/// What is there at this moment, for those who only look.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub mounted: &'a MountedVolume,
    pub claims: &'a Claims<'a>,
}

impl View<'_> {
    /// The inode, if it exists in that generation.
    pub fn live(self, inode: InodeRef) -> Result<Option<Arc<Cell>>> {
        Ok(self.mounted.find(inode.ino)?.filter(|c| c.is(inode) && !c.state.read().deleted))
    }

    /// The directory, if it exists.
    pub fn dir(self, ino: InodeNo) -> Result<Option<Arc<Cell>>> {
        Ok(self.mounted.find_dir(ino)?.filter(|c| {
            let st = c.state.read();
            !st.deleted && st.nlink > 0
        }))
    }

    /// The entry of a name.
    pub fn find(self, dir: &Arc<Cell>, name: &[u8]) -> Result<Option<Dentry>> {
        let hash = name_hash(&self.mounted.shared.hash_key, name);
        let d = self.mounted.dom(dir.domain);
        let mut st = dir.state.write();
        d.with_index(dir.ino, &mut st, |ix, load| Ok(ix.find(hash, name, load)?.cloned()))
    }

    /// Whether a synced inode took this name from `c`: it may have left it again, but the name does not go back.
    pub fn is_taken(self, dir: InodeNo, name: &[u8], c: &Cell) -> bool {
        let mut others = self.claims.on(self.mounted.place_of(dir), dir, name).filter(|o| o.ino != c.ino).peekable();
        if others.peek().is_none() {
            return false;
        }
        let seq = c.state.read().link_seq;
        others.any(|o| o.seq > seq)
    }

    /// Whether [`Pass::relink_forwarded`](super::Pass::relink_forwarded) would find all as it is.
    pub fn is_linked(self, f: &Forwarded) -> Result<bool> {
        let c = &f.cell;
        let links = {
            let st = c.state.read();
            if st.deleted || f.old_links.iter().any(|l| !st.links.contains(l)) {
                return Ok(false);
            }
            st.links.to_vec()
        };
        for l in &links {
            let Some(d) = self.dir(l.parent)? else { return Ok(false) };
            let named = self.find(&d, &l.name)?.is_some_and(|e| c.is((&e).into()));
            if !named || self.is_taken(l.parent, &l.name, c) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether [`Pass::apply_claim`](super::Pass::apply_claim) would find nothing to do.
    pub fn is_applied(self, claim: &Claim) -> Result<bool> {
        let Link { parent, name } = &claim.link;
        let Some(d) = self.dir(*parent)? else { return Ok(true) };
        let Some(e) = self.find(&d, name)? else { return Ok(true) };
        let Some(x) = self.live((&e).into())? else { return Ok(true) };
        Ok(!x.state.read().has_link(*parent, name) || !self.is_taken(*parent, name, &x))
    }
}
