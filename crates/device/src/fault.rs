//! A device that fails as it is told: errors, lies, delays, death.
//!
//! Owns a list of [`Rule`]s and a random stream from a seed, so that a single-threaded run can be repeated.
//! Every rule that fits an operation is asked, in the order of adding; delays add up, of the other effects the
//! first wins. Each write of a batch is an operation of its own.

use crate::count::Tally;
use crate::{AlignedBuf, BLOCK_BYTES, Counters, Device, WriteOp};
use braidfs_sync::device::Mutex;
use braidfs_sync::{Condvar, rank};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// The operations that a rule is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// A read of any size ([`Device::read`]).
    Read,
    /// One write of a `write_batch`.
    Write,
    /// A `flush`. Has no blocks: a rule's block range is not asked.
    Flush,
    /// A discard ([`Device::discard`]).
    Discard,
}

/// What becomes of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// It does nothing and fails with this errno.
    Fail(i32),
    /// Only the first so many blocks are read or written; then it fails.
    Short(u64),
    /// As `Short`, in bytes: a write leaves the rest of its last block as it was. A read gives whole blocks.
    Torn(usize),
    /// It takes longer.
    Delay(Duration),
    /// It takes until [`FaultDevice::clear`].
    Stall,
    /// One bit of the data, in a block that the rule is for, is wrong, and nobody says so.
    FlipBit,
    /// It does nothing and says that all went well. A read keeps its buffer as it was.
    Lose,
    /// It goes to a place so many blocks away; outside the device it is lost.
    Misdirect(i64),
    /// The device dies: as [`FaultDevice::stop`], this operation being the first that fails.
    Stop,
    /// It panics, as a device with a bug does.
    Panic,
}

/// When something goes wrong. [`Rule::new`] fires always; the other functions restrict it.
#[derive(Debug, Clone)]
pub struct Rule {
    op: Op,
    effect: Effect,
    blocks: Range<u64>,
    skip: u64,
    times: u64,
    chance: f64,
}

impl Rule {
    /// `effect` on each `op`.
    pub fn new(op: Op, effect: Effect) -> Self {
        Self { op, effect, blocks: 0..u64::MAX, skip: 0, times: u64::MAX, chance: 1.0 }
    }

    /// Only for operations that touch one of `blocks`.
    pub fn blocks(self, blocks: Range<u64>) -> Self {
        Self { blocks, ..self }
    }

    /// Not for the first `operations` that fit.
    pub fn skip(self, operations: u64) -> Self {
        Self { skip: operations, ..self }
    }

    /// At most so many times.
    pub fn times(self, times: u64) -> Self {
        Self { times, ..self }
    }

    /// With this probability, 0 to 1, each time.
    pub fn chance(self, chance: f64) -> Self {
        Self { chance, ..self }
    }

    fn fits(&self, op: Op, blocks: &Range<u64>) -> bool {
        let touches = self.blocks.start < blocks.end && blocks.start < self.blocks.end;
        self.op == op && (op == Op::Flush || touches)
    }
}

/// A device with faults before another one.
#[derive(Debug)]
pub struct FaultDevice {
    inner: Arc<dyn Device>,
    rules: Mutex<Vec<Rule>, rank::FaultRules>,
    /// Whether `rules` has any, so that the common case takes no lock.
    armed: AtomicBool,
    stopped: AtomicBool,
    /// A flush failed: what was written before it is in an unknown state for good.
    unflushed: Mutex<Option<i32>, rank::FaultFlush>,
    read_only: AtomicBool,
    random: AtomicU64,
    fired: AtomicU64,
    /// How often the rules were taken away, and how many operations wait for the next time.
    stalls: Mutex<(u64, usize), rank::FaultStalls>,
    go_on: Condvar,
    tally: Tally,
}

impl FaultDevice {
    /// No faults yet. `seed` decides what [`Rule::chance`] and [`Effect::FlipBit`] do.
    pub fn new(inner: Arc<dyn Device>, seed: u64) -> Self {
        Self {
            inner,
            rules: Mutex::default(),
            armed: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            unflushed: Mutex::new(None),
            read_only: AtomicBool::new(false),
            random: AtomicU64::new(seed),
            fired: AtomicU64::new(0),
            stalls: Mutex::default(),
            go_on: Condvar::new(),
            tally: Tally::default(),
        }
    }

    /// Adds a rule.
    pub fn add(&self, rule: Rule) {
        let mut rules = self.rules.lock();
        rules.push(rule);
        self.armed.store(true, Relaxed);
    }

    /// Takes all rules away, and lets go what is stalled. A stopped device stays stopped, and one whose flush failed refuses
    /// every later one, as [`Device::flush`] says.
    pub fn clear(&self) {
        let mut rules = self.rules.lock();
        rules.clear();
        self.armed.store(false, Relaxed);
        drop(rules);
        self.stalls.lock().0 += 1;
        self.go_on.notify_all();
    }

    /// How many operations are stalled.
    pub fn stalled(&self) -> usize {
        self.stalls.lock().1
    }

    fn stall(&self, since: u64) {
        let mut h = self.stalls.lock();
        h.1 += 1;
        while h.0 == since {
            self.go_on.wait(&mut h);
        }
        h.1 -= 1;
    }

    /// Kills the device: every later operation fails with `EIO`, and nothing more reaches the inner device.
    pub fn stop(&self) {
        self.stopped.store(true, Relaxed);
    }

    /// Whether it was killed.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Relaxed)
    }

    /// Makes writes and discards fail with `EROFS`, or not any more.
    pub fn set_read_only(&self, on: bool) {
        self.read_only.store(on, Relaxed);
    }

    /// How many effects were applied so far.
    pub fn fired(&self) -> u64 {
        self.fired.load(Relaxed)
    }

    /// The operations so far, failed ones too.
    pub fn counters(&self) -> Counters {
        self.tally.get()
    }

    /// The device behind.
    pub fn inner(&self) -> &Arc<dyn Device> {
        &self.inner
    }

    /// The next number of the stream (SplitMix64).
    fn random(&self) -> u64 {
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut z = self.random.fetch_add(STEP, Relaxed).wrapping_add(STEP);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Waits as the rules say and tells the effect, if any, on an operation, and the blocks that its rule is for.
    fn effect(&self, op: Op, blocks: Range<u64>) -> io::Result<Option<(Effect, Range<u64>)>> {
        self.alive()?;
        if !self.armed.load(Relaxed) {
            return Ok(None);
        }
        let (mut delay, mut hold, mut effect) = (Duration::ZERO, None, None);
        for rule in self.rules.lock().iter_mut() {
            let is_delay = matches!(rule.effect, Effect::Delay(_) | Effect::Stall);
            if !rule.fits(op, &blocks) || rule.times == 0 || (effect.is_some() && !is_delay) {
                continue;
            }
            if rule.skip > 0 {
                rule.skip -= 1;
                continue;
            }
            // 53 bits are what an f64 in 0..1 has.
            if rule.chance < 1.0 && (self.random() >> 11) as f64 / (1u64 << 53) as f64 >= rule.chance {
                continue;
            }
            rule.times -= 1;
            self.fired.fetch_add(1, Relaxed);
            match rule.effect {
                Effect::Delay(d) => delay += d,
                // under the lock of the rules: they cannot have been taken away yet
                Effect::Stall => hold = Some(self.stalls.lock().0),
                other => effect = Some((other, rule.blocks.clone())),
            }
        }
        if delay > Duration::ZERO {
            std::thread::sleep(delay);
        }
        if let Some(since) = hold {
            self.stall(since);
        }
        if hold.is_some() || delay > Duration::ZERO {
            self.alive()?;
        }
        match effect {
            Some((Effect::Fail(errno), _)) => Err(io::Error::from_raw_os_error(errno)),
            Some((Effect::Stop, _)) => {
                self.stop();
                self.alive()?;
                Ok(None)
            }
            Some((Effect::Panic, _)) => panic!("a panic on purpose"),
            other => Ok(other),
        }
    }

    fn alive(&self) -> io::Result<()> {
        if self.is_stopped() { Err(io::Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
    }

    fn writable(&self) -> io::Result<()> {
        self.alive()?;
        if self.read_only.load(Relaxed) { Err(io::Error::from_raw_os_error(libc::EROFS)) } else { Ok(()) }
    }

    /// Flips a bit of `data`, which is that of `block` and the following, in one of the blocks `of`.
    fn flip_bit(&self, data: &mut [u8], block: u64, of: &Range<u64>) {
        let end = of.end.saturating_sub(block).min((data.len() / BLOCK_BYTES) as u64) as usize;
        let start = of.start.saturating_sub(block).min(end as u64) as usize;
        let hit = &mut data[start * BLOCK_BYTES..end * BLOCK_BYTES];
        if !hit.is_empty() {
            let bit = self.random() % (hit.len() as u64 * 8);
            hit[(bit / 8) as usize] ^= 1 << (bit % 8);
        }
    }

    /// What of `op` reaches the device when it is cut off after `n` bytes, with what stays of its last block.
    fn torn(&self, op: &WriteOp<'_>, n: usize) -> io::Result<AlignedBuf> {
        let (head, part) = (n / BLOCK_BYTES * BLOCK_BYTES, n % BLOCK_BYTES);
        let all = op.bufs.concat();
        if part == 0 {
            return Ok(AlignedBuf::gather(&[&all[..head]]));
        }
        let mut last = AlignedBuf::gather(&[&all[head..head + BLOCK_BYTES]]);
        self.inner.read(op.block + (head / BLOCK_BYTES) as u64, &mut last)?;
        last[..part].copy_from_slice(&all[head..n]);
        Ok(AlignedBuf::gather(&[&all[..head], &last[..]]))
    }

    /// Where `blocks` blocks at `block` go astray; none if that is off the device.
    fn astray(&self, block: u64, blocks: u64, by: i64) -> Option<u64> {
        let to = block.checked_add_signed(by)?;
        (to.checked_add(blocks)? <= self.blocks()).then_some(to)
    }
}

/// What reaches the inner device of one write.
enum Outcome<'a> {
    AsIs(&'a WriteOp<'a>),
    /// Other data, or another place.
    Changed(u64, AlignedBuf),
}

/// An effect on an operation of which only whole blocks can be done.
fn whole((effect, of): (Effect, Range<u64>)) -> (Effect, Range<u64>) {
    match effect {
        Effect::Torn(n) => (Effect::Short((n / BLOCK_BYTES) as u64), of),
        other => (other, of),
    }
}

fn blocks_of(block: u64, bytes: usize) -> Range<u64> {
    block..block.saturating_add((bytes / BLOCK_BYTES) as u64)
}

impl Device for FaultDevice {
    fn blocks(&self) -> u64 {
        self.inner.blocks()
    }

    fn grown(&self) -> io::Result<u64> {
        self.inner.grown()
    }

    fn extend(&self, blocks: u64) -> io::Result<()> {
        self.inner.extend(blocks)
    }

    fn cut_off(&self, blocks: u64) -> io::Result<()> {
        self.inner.cut_off(blocks)
    }

    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        self.tally.read(buf.len());
        let range = blocks_of(block, buf.len());
        let blocks = range.end - range.start;
        match self.effect(Op::Read, range)?.map(whole) {
            Some((Effect::Short(n), _)) if n < blocks => {
                self.inner.read(block, &mut buf[..n as usize * BLOCK_BYTES])?;
                Err(io::Error::new(io::ErrorKind::UnexpectedEof, "injected short read"))
            }
            Some((Effect::FlipBit, of)) => {
                self.inner.read(block, buf)?;
                self.flip_bit(buf, block, &of);
                Ok(())
            }
            Some((Effect::Misdirect(by), _)) => match self.astray(block, blocks, by) {
                Some(other) => self.inner.read(other, buf),
                None => Ok(()),
            },
            Some((Effect::Lose, _)) => Ok(()),
            _ => self.inner.read(block, buf),
        }
    }

    fn write_batch(&self, ops: &[WriteOp<'_>]) -> io::Result<()> {
        self.tally.write(ops);
        self.writable()?;
        if !self.armed.load(Relaxed) {
            return self.inner.write_batch(ops);
        }
        let mut result = Ok(());
        let mut outcomes = Vec::with_capacity(ops.len());
        for op in ops {
            let bytes = op.bufs.iter().map(|b| b.len()).sum();
            let range = blocks_of(op.block, bytes);
            let blocks = range.end - range.start;
            let effect = match self.effect(Op::Write, range) {
                Ok(effect) => effect,
                Err(e) => {
                    result = result.and(Err(e));
                    continue;
                }
            };
            match effect {
                Some((Effect::Short(n), _)) if n < blocks => {
                    let head = AlignedBuf::gather(&[&op.bufs.concat()[..n as usize * BLOCK_BYTES]]);
                    outcomes.push(Outcome::Changed(op.block, head));
                    let e = io::Error::new(io::ErrorKind::WriteZero, "injected short write");
                    result = result.and(Err(e));
                }
                Some((Effect::Torn(n), _)) if n < bytes => {
                    outcomes.push(Outcome::Changed(op.block, self.torn(op, n)?));
                    let e = io::Error::new(io::ErrorKind::WriteZero, "injected torn write");
                    result = result.and(Err(e));
                }
                Some((Effect::FlipBit, of)) => {
                    let mut data = AlignedBuf::gather(&op.bufs);
                    self.flip_bit(&mut data, op.block, &of);
                    outcomes.push(Outcome::Changed(op.block, data));
                }
                Some((Effect::Misdirect(by), _)) => {
                    if let Some(other) = self.astray(op.block, blocks, by) {
                        outcomes.push(Outcome::Changed(other, AlignedBuf::gather(&op.bufs)));
                    }
                }
                Some((Effect::Lose, _)) => {}
                _ => outcomes.push(Outcome::AsIs(op)),
            }
        }
        let through: Vec<WriteOp<'_>> = outcomes
            .iter()
            .map(|o| match o {
                Outcome::AsIs(op) => WriteOp { block: op.block, bufs: op.bufs.clone() },
                Outcome::Changed(block, data) => WriteOp { block: *block, bufs: vec![&data[..]] },
            })
            .collect();
        let written = if through.is_empty() { Ok(()) } else { self.inner.write_batch(&through) };
        result.and(written)
    }

    fn flush(&self) -> io::Result<()> {
        self.tally.flush();
        self.alive()?;
        if let Some(errno) = *self.unflushed.lock() {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let effect = self.effect(Op::Flush, 0..0).inspect_err(|e| {
            *self.unflushed.lock() = Some(e.raw_os_error().unwrap_or(libc::EIO));
        })?;
        match effect {
            Some((Effect::Lose, _)) => Ok(()),
            _ => self.inner.flush(),
        }
    }

    fn discard(&self, block: u64, blocks: u64) -> io::Result<()> {
        self.tally.discard(blocks);
        self.writable()?;
        match self.effect(Op::Discard, block..block.saturating_add(blocks))?.map(whole) {
            Some((Effect::Lose, _)) => Ok(()),
            Some((Effect::Misdirect(by), _)) => match self.astray(block, blocks, by) {
                Some(other) => self.inner.discard(other, blocks),
                None => Ok(()),
            },
            Some((Effect::Short(n), _)) => self.inner.discard(block, blocks.min(n)),
            _ => self.inner.discard(block, blocks),
        }
    }

    fn name(&self) -> String {
        format!("{} with faults", self.inner.name())
    }
}
