//! What threads do that wait for no answer: looked up in `/proc` by a thread that may be left waiting there.
//!
//! `/proc/T/syscall` waits while the process of T is in the midst of an `execve` (`lock_trace` in fs/proc/base.c takes its
//! `exec_update_lock`). Just there the kernel closes descriptors (`begin_new_exec` in fs/exec.c), and FUSE writes a file back and
//! tells its server before that: it may be this process that must answer first, or the server of another file system, which
//! may never answer. So nobody who is waited for looks himself: neither a serving thread nor a helper. A *looker* does. One that
//! does not come back is given up, with what it looks at then, and counts as not having seen it.
//!
//! A thread that waits for an answer of ours can be looked at by anybody, since an `execve` in its process waits for its end first;
//! but not where it asks what is asked for in an `execve`, too, as the times of a file that is closed are (SETATTR).
//!
//! Does not promise an answer: where [`MOST_GIVEN_UP`] lookers wait, nobody looks.

use crate::requester::{self, Seen};
use crate::session::run_aside;
use braidfs_sync::{Mutex, rank};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

/// A looker that has not seen a thread for so long is given up.
const PATIENCE: Duration = Duration::from_millis(100);
/// So many lookers wait at most, each at another thread.
const MOST_GIVEN_UP: usize = 8;

type Look = fn(u32) -> Seen;

/// See the module.
#[derive(Debug)]
pub(crate) struct Looks {
    lookers: Mutex<Lookers, rank::Looks>,
    look: Look,
}

#[derive(Debug, Default)]
struct Lookers {
    /// Who looks, if somebody has before.
    now: Option<Looker>,
    /// What those look at that were given up.
    given_up: Vec<Arc<AtomicU32>>,
}

#[derive(Debug)]
struct Looker {
    orders: Sender<Order>,
    /// The thread that it looks at. It has the other reference to this until it ends.
    at: Arc<AtomicU32>,
}

/// Threads to look at, and where to tell of each.
#[derive(Debug)]
struct Order {
    threads: Vec<u32>,
    seen: Sender<(u32, Seen)>,
}

impl Default for Looks {
    fn default() -> Self {
        Self::by(requester::look_at)
    }
}

impl Looks {
    /// Those who look do it so.
    pub(crate) fn by(look: Look) -> Self {
        Self { lookers: Mutex::default(), look }
    }

    /// What these threads do, of those that are seen in time. On a serving thread only what is rare ([`crate::past_cache`],
    /// [`crate::within_quota::taking`]): it may wait for [`PATIENCE`].
    pub fn at(&self, mut threads: Vec<u32>) -> HashMap<u32, Seen> {
        let mut found = HashMap::new();
        let mut lookers = self.lookers.lock();
        lookers.given_up.retain(|at| Arc::strong_count(at) > 1);
        loop {
            threads.retain(|t| {
                !found.contains_key(t) && lookers.given_up.iter().all(|at| at.load(Ordering::SeqCst) != *t)
            });
            if threads.is_empty() || lookers.given_up.len() >= MOST_GIVEN_UP {
                return found;
            }
            let Some(told) = lookers.order(&threads, self.look) else { return found };
            loop {
                match told.recv_timeout(PATIENCE) {
                    Ok((thread, seen)) => drop(found.insert(thread, seen)),
                    Err(RecvTimeoutError::Disconnected) => return found,
                    Err(RecvTimeoutError::Timeout) => break,
                }
            }
            let late = lookers.now.take().map(|looker| looker.at);
            tracing::debug!(thread = ?late, "a thread is not seen: it waits for an execve");
            lookers.given_up.extend(late);
        }
    }
}

impl Lookers {
    /// Has somebody look; `None`: nobody can.
    fn order(&mut self, threads: &[u32], look: Look) -> Option<Receiver<(u32, Seen)>> {
        let (seen, told) = mpsc::channel();
        let mut order = Order { threads: threads.to_vec(), seen };
        if let Some(now) = self.now.take() {
            match now.orders.send(order) {
                Ok(()) => {
                    self.now = Some(now);
                    return Some(told);
                }
                // it has ended by a panic
                Err(back) => order = back.0,
            }
        }
        let (orders, work) = mpsc::channel();
        let at = Arc::new(AtomicU32::new(0));
        let its = at.clone();
        if let Err(e) = run_aside("fuse-look", move || look_at_all(&work, &its, look)) {
            tracing::warn!(error = %e, "no thread to look what writers do");
            return None;
        }
        orders.send(order).ok()?;
        self.now = Some(Looker { orders, at });
        Some(told)
    }
}

/// The work of a looker, until it is given up.
fn look_at_all(orders: &Receiver<Order>, at: &AtomicU32, look: Look) {
    for Order { threads, seen } in orders {
        for thread in threads {
            at.store(thread, Ordering::SeqCst);
            if seen.send((thread, look(thread))).is_err() {
                return;
            }
        }
        at.store(0, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::requester::Doing;
    use std::sync::atomic::AtomicBool;
    use std::time::Instant;

    /// One that is never seen costs a looker once, and the others are seen.
    #[test]
    fn who_is_not_seen_is_left_out() {
        static LET_GO: AtomicBool = AtomicBool::new(false);
        fn look(thread: u32) -> Seen {
            while thread % 10 == 7 && !LET_GO.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
            Seen::NOTHING
        }
        let looks = Looks::by(look);
        let seen = |threads: &[u32]| {
            let mut seen: Vec<u32> = looks.at(threads.to_vec()).into_keys().collect();
            seen.sort_unstable();
            seen
        };
        let given_up = || looks.lookers.lock().given_up.len();
        assert!(seen(&[]).is_empty() && looks.lookers.lock().now.is_none());
        assert_eq!((seen(&[1, 2, 3]), given_up()), (vec![1, 2, 3], 0));
        assert_eq!((seen(&[1, 7, 3]), given_up()), (vec![1, 3], 1));
        assert_eq!((seen(&[7]), seen(&[4, 7]), given_up()), (vec![], vec![4], 1), "nobody looks at it again");
        let many: Vec<u32> = (0..30).map(|n| 10 * n + 7).collect();
        assert_eq!((seen(&many), given_up()), (vec![], MOST_GIVEN_UP));
        assert!(seen(&[1]).is_empty(), "nobody is left");
        LET_GO.store(true, Ordering::SeqCst);
        let end = Instant::now() + Duration::from_secs(20);
        // some come back later than another one is free to look
        while (seen(&[1, 7]), given_up()) != (vec![1, 7], 0) {
            assert!(Instant::now() < end, "lookers that come back are no longer counted");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn own_threads_are_seen() {
        let own = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        let seen = Looks::default().at(vec![own, u32::MAX >> 2]);
        assert_eq!(seen.get(&(u32::MAX >> 2)).map(|s| s.doing), Some(Doing::Other), "it is gone");
        assert!(seen.contains_key(&own));
    }
}
