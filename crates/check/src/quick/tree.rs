//! Whether every directory hangs below the root.

use super::state::{Doubt, doubt};
use braidfs_format::InodeNo;

/// Checks `dirs`, directories with their parents (the root's is of no account).
pub fn reaches_root(mut dirs: Vec<(u64, u64)>) -> Result<(), Doubt> {
    dirs.sort_unstable();
    let find = |node: u64| dirs.binary_search_by_key(&node, |d| d.0).ok();
    /// Not looked at; on the way that is looked at; below the root.
    const NEW: u8 = 0;
    const WAY: u8 = 1;
    const GOOD: u8 = 2;
    let mut state = vec![NEW; dirs.len()];
    let mut way = Vec::new();
    for i in 0..dirs.len() {
        let mut at = i;
        while state[at] == NEW {
            state[at] = WAY;
            way.push(at);
            if dirs[at].0 == InodeNo::ROOT.0 {
                state[at] = GOOD;
                break;
            }
            match find(dirs[at].1) {
                Some(up) => at = up,
                None => return doubt(format!("directory {} hangs in no directory", dirs[at].0)),
            }
        }
        if state[at] == WAY {
            return doubt(format!("directory {} hangs below itself", dirs[at].0));
        }
        way.drain(..).for_each(|w| state[w] = GOOD);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_loops_and_orphans() {
        let root = InodeNo::ROOT.0;
        assert!(reaches_root(vec![]).is_ok());
        assert!(reaches_root(vec![(root, 0), (5, root), (9, 5), (3, 9)]).is_ok());
        assert!(reaches_root(vec![(root, 0), (5, 9), (9, 5)]).is_err());
        assert!(reaches_root(vec![(root, 0), (5, 5)]).is_err());
        assert!(reaches_root(vec![(root, 0), (5, 77)]).is_err());
        let deep: Vec<_> =
            (0..100_000u64).map(|i| (i + 2, if i == 0 { root } else { i + 1 })).chain([(root, 0)]).collect();
        assert!(reaches_root(deep).is_ok());
    }
}
