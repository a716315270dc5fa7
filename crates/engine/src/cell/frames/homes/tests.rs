use super::*;
use crate::cell::frames::Frame;
use crate::cell::frames::pool::{BATCH, IDLE, RUN};
use crate::numa::Topology;
use crate::numa::recorder::Recorder;
use crate::numa::topology::tests::machine;

const CHUNK_OF_PAGES: u64 = (FRAMES * BLOCK_BYTES) as u64;

fn pools(t: &Topology, budget: u64) -> (Homes, Arc<Recorder>) {
    let recorder = Arc::new(Recorder::default());
    let binder: Arc<dyn Binder> = recorder.clone();
    (Homes::new(t.nodes(), &binder, budget), recorder)
}

fn four() -> Topology {
    machine(&[
        (0, "0", 8, "10 20 30 40"),
        (2, "1", 8, "20 10 30 40"),
        (5, "2", 8, "40 30 10 20"),
        (7, "3", 8, "10 10 10 10"),
    ])
}

fn in_use(h: &Homes) -> Vec<usize> {
    h.homes.iter().map(|h| h.in_use()).collect()
}

#[test]
fn frames_come_from_their_node_and_go_back_there() {
    let (h, recorder) = pools(&four(), 40 * CHUNK_OF_PAGES);
    let mut all: Vec<Frame> = Vec::new();
    for place in [2, 0, 3] {
        all.extend((0..2 * FRAMES).map(|_| Frame::zeroed(h.of(place))));
    }
    assert_eq!(in_use(&h), [2 * FRAMES, 0, 2 * FRAMES, 2 * FRAMES]);
    assert!(all.chunks(2 * FRAMES).zip([5, 0, 7]).all(|(f, n)| f.iter().all(|f| f.home().node() == Some(n))));
    // one call for many chunks, and none for node 2
    assert_eq!(*recorder.memory.lock(), [5, 0, 7].map(|n| (RUN * CHUNK, n)));
    // a copy of a frame that somebody shares is where that is
    let shared = all[0].clone();
    all[0].make_mut()[0] = 1;
    assert_eq!((all[0].home(), shared.home()), (h.of(2), h.of(2)));
    assert_ne!(all[0].address(), shared.address());
    let mut other = shared.clone();
    other.replace(&[7; BLOCK_BYTES]);
    assert_eq!((other.home(), in_use(&h)[2]), (h.of(2), 2 * FRAMES + 2));
    drop((shared, other));
    // dropped by whoever has them last
    std::thread::scope(|s| s.spawn(|| drop(all)).join().unwrap());
    assert_eq!(in_use(&h), [0; 4]);
    // and used again before there is a new chunk
    let again: Vec<Frame> = (0..FRAMES - BATCH).map(|_| Frame::zeroed(h.of(2))).collect();
    assert!(again.iter().all(|f| f.home() == h.of(2)));
    assert_eq!(recorder.memory.lock().len(), 3);
}

#[test]
fn where_a_share_is_used_up_the_nearest_other_node_gives() {
    // 8 chunks of pages for four nodes: 2 for each
    let (h, recorder) = pools(&four(), 8 * CHUNK_OF_PAGES);
    let mut all = Vec::new();
    let mut take = |n: usize| {
        all.extend((0..n).map(|_| Frame::zeroed(h.of(2))));
        in_use(&h)
    };
    let share = 2 * FRAMES;
    assert_eq!(take(share), [0, 0, share, 0]);
    // of node 5: node 7, node 2, node 0
    assert_eq!(take(1), [0, 0, share, 1]);
    assert_eq!(take(share), [0, 1, share, share]);
    assert_eq!(take(share), [1, share, share, share]);
    assert_eq!(take(share - 1), [share; 4]);
    // all that the volume may have: who counts its pages lets it have more, and it has that from its own node
    assert_eq!(take(share), [share, share, 2 * share, share]);
    let (own, others): (Vec<Frame>, Vec<Frame>) = all.into_iter().partition(|f| f.home() == h.of(2));
    drop(others);
    assert_eq!(in_use(&h), [0, 0, 2 * share, 0]);
    drop(own);
    assert_eq!(in_use(&h), [0; 4]);
    // what is free is taken before another node is asked, also beyond the share
    let first = Frame::zeroed(h.of(2));
    assert_eq!(first.home(), h.of(2));
    assert_eq!(recorder.memory.lock().len(), 4);
}

/// Shares are of all volumes together, by the memory of the nodes, and end with the volumes.
#[test]
fn shares_are_by_memory() {
    let t = machine(&[(0, "0", 3000, "10 20"), (1, "1", 1000, "20 10")]);
    let (h, recorder) = pools(&t, 40 * CHUNK_OF_PAGES);
    let shares = |h: &Homes| -> Vec<usize> { h.homes.iter().map(|h| h.pool().unwrap().pool.lock().share).collect() };
    assert_eq!(shares(&h), [30, 10]);
    let binder: Arc<dyn Binder> = recorder;
    let second = Homes::new(t.nodes(), &binder, 4 * CHUNK_OF_PAGES);
    assert_eq!(second.homes, h.homes, "the same pools");
    assert_eq!(shares(&h), [33, 11]);
    drop(h);
    assert_eq!(shares(&second), [3, 1]);
    // numbers without sense
    let huge = machine(&[(0, "0", u64::MAX >> 20, "10 20"), (1, "1", 1, "20 10")]);
    let (h, _) = pools(&huge, u64::MAX);
    assert!(shares(&h)[0] > 1 << 30);
}

#[test]
fn a_kernel_that_refuses_gives_memory_all_the_same() {
    let t = four();
    let binder: Arc<dyn Binder> = Arc::new(Recorder { refuses: Some(libc::EPERM), ..Recorder::default() });
    let h = Homes::new(t.nodes(), &binder, 8 * CHUNK_OF_PAGES);
    let f = Frame::copy_of(&[3; BLOCK_BYTES], h.of(1));
    assert_eq!((*f, f.home()), ([3; BLOCK_BYTES], h.of(1)));
}

/// Trimmed as those of no node: chunks that nobody wants go back to the system.
#[test]
fn chunks_of_a_node_are_given_back() {
    let (h, recorder) = pools(&four(), 1000 * CHUNK_OF_PAGES);
    let all: Vec<Frame> = (0..(RUN + 4) * FRAMES).map(|_| Frame::zeroed(h.of(1))).collect();
    assert_eq!(*recorder.memory.lock(), [(RUN * CHUNK, 2); 2], "a second run for the rest");
    drop(all);
    let chunks = || h.of(1).pool().unwrap().pool.lock().chunks.len();
    assert_eq!(chunks(), RUN + 4);
    let now = Instant::now();
    (0..4).for_each(|i| super::trim(now + i * IDLE));
    assert!(chunks() <= 4, "{} chunks", chunks());
    // what of the run was never used still is
    let some: Vec<Frame> = (0..20 * FRAMES).map(|_| Frame::copy_of(&[9; BLOCK_BYTES], h.of(1))).collect();
    assert!(some.iter().all(|f| **f == [9; BLOCK_BYTES]));
    assert_eq!(recorder.memory.lock().len(), 3, "12 more of the second run, then a third");
}
