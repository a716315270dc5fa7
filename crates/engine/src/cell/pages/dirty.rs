//! Which groups of a file's pages have a dirty one: who writes these out, or looks for the next, looks at no others.
//!
//! Invariant: a group stands here where a page of it is dirty, and only there. So this changes with the first page of
//! a group that becomes dirty and the last that becomes clean, by who has the map alone: to overwrite dirty pages
//! side by side ([`super::shared`]) writes nothing here.

use std::collections::BTreeSet;

/// Numbers of groups. One, as most files have at most, stands in the cell; more in a set elsewhere ([`super::Far`]),
/// which is empty else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirtyGroups(u64);

/// Beyond the groups that a file can have.
const NONE: u64 = u64::MAX;
/// They are in the set.
const SET: u64 = u64::MAX - 1;

impl Default for DirtyGroups {
    fn default() -> Self {
        Self(NONE)
    }
}

impl DirtyGroups {
    /// A page of this group has become dirty, and none was.
    pub fn insert<'s>(&mut self, g: u64, set: impl FnOnce() -> &'s mut BTreeSet<u64>) {
        match self.0 {
            NONE => self.0 = g,
            SET => drop(set().insert(g)),
            one => {
                set().extend([one, g]);
                self.0 = SET;
            }
        }
    }

    /// No page of these groups is dirty any more.
    pub fn remove(&mut self, gone: &[u64], set: Option<&mut BTreeSet<u64>>) {
        match (self.0, set) {
            (SET, Some(set)) => {
                if set.len() == gone.len() {
                    set.clear();
                } else {
                    for g in gone {
                        set.remove(g);
                    }
                }
                if set.is_empty() {
                    self.0 = NONE;
                }
            }
            (one, _) if gone.contains(&one) => self.0 = NONE,
            _ => {}
        }
    }

    /// Those of `[from, to)`, rising.
    pub fn range<'s>(&self, set: Option<&'s BTreeSet<u64>>, from: u64, to: u64) -> impl Iterator<Item = u64> + use<'s> {
        let one = Some(self.0).filter(|g| *g < SET && (from..to).contains(g));
        let set = set.filter(|_| self.0 == SET).map(|s| s.range(from..to.max(from)));
        one.into_iter().chain(set.into_iter().flatten().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_needs_no_set() {
        let (mut d, mut set) = (DirtyGroups::default(), BTreeSet::new());
        let all = |d: &DirtyGroups, s: &BTreeSet<u64>| d.range(Some(s), 0, u64::MAX).collect::<Vec<_>>();
        assert_eq!(all(&d, &set), [0; 0]);
        d.insert(7, || unreachable!());
        assert_eq!((d.range(None, 0, 7).count(), d.range(None, 8, u64::MAX).count(), all(&d, &set)), (0, 0, vec![7]));
        d.remove(&[6], None);
        d.insert(1 << 40, || &mut set);
        d.insert(3, || &mut set);
        assert_eq!((all(&d, &set), d.range(Some(&set), 4, 8).collect::<Vec<_>>()), (vec![3, 7, 1 << 40], vec![7]));
        assert_eq!(d.range(Some(&set), 8, 4).count(), 0);
        d.remove(&[7], Some(&mut set));
        assert_eq!(all(&d, &set), [3, 1 << 40]);
        d.remove(&[3, 1 << 40], Some(&mut set));
        assert_eq!((d, set.len()), (DirtyGroups::default(), 0));
        d.insert(0, || unreachable!());
        assert_eq!(all(&d, &set), [0]);
        d.remove(&[0], Some(&mut set));
        assert_eq!(d, DirtyGroups::default());
    }
}
