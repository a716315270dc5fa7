//! For tests: many operations that a domain admits at the same time, when its journal is as full as it may be then. A commit of what they
//! do must have room there.

use super::{OpenFile, Volume};
use crate::error::Result;
use crate::types::InodeNo;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Does `work` with each of the files, which are of one domain, by threads that are all inside its gate before the first goes on.
///
/// # Panics
/// One of them fails, or the domain does so with the commit of all.
pub fn at_once(
    v: &Arc<Volume>,
    files: &[OpenFile],
    work: impl Fn(&Volume, InodeNo) -> Result<()> + Copy + Send + 'static,
) {
    let d = v.mounted().dom(files[0].cell.domain).clone();
    // as full as it may be for one more to be admitted
    d.checkpoint().unwrap();
    for n in 0u64.. {
        if (d.journal.used() + 10) * 8 > d.journal.blocks() * 5 {
            break;
        }
        v.write(&files[0], 0, &n.to_le_bytes()).unwrap();
        d.flush_cell(&files[0].cell).unwrap();
        d.commit().unwrap();
    }
    let locked: Vec<_> = files.iter().map(|f| f.cell.state.read()).collect();
    let start = |f: &OpenFile| {
        let (v, ino) = (v.clone(), f.ino());
        thread::spawn(move || work(&v, ino))
    };
    let threads: Vec<_> = files.iter().map(start).collect();
    thread::sleep(Duration::from_millis(500));
    drop(locked);
    for t in threads {
        t.join().unwrap().unwrap();
    }
    v.sync().unwrap();
    assert_eq!(d.failed(), None);
}
