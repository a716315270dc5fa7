//! Requests that take room though no `write` asked for it: FALLOCATE, COPY_FILE_RANGE, with OPEN WRITEs of files that are written
//! through, and in a tight domain what makes names or sets attributes. They leave what the kernel may hold, or was granted
//! ([`super`]): that was accepted before.
//!
//! In a domain that is not tight they go on at once where it has so much beside them that it stays so. Else it becomes tight
//! first, and the kernel writes back what it took of it without asking, twice: the second time what was under way the first
//! time. In a tight one they go on where the domain has as much beside what was granted (with OPEN: beside all that the kernel
//! may hold, where a file was promised room). Else a helper thread has that written back, as before a `write` that does not
//! fit; then the volume itself tells whether there is room, but for threads that are in the midst of a `write` still, and for who
//! was told to go on meanwhile. Where too many wait already, what fits beside all that the kernel may hold is had at once.
//!
//! For what makes a name, or sets an attribute, the kernel holds a lock meanwhile, which may be in the way of other tenants' renames:
//! over a mount that they share it waits for [`LOCKED_WAIT`] at most, and so does a rename to another directory over any but a
//! tenant's own, for which the kernel holds a lock of the whole mount. Then it is refused.
//!
//! **Who runs is counted** ([`Taking`]): its blocks are nobody else's from before it looks until it is done. What it has
//! taken by then counts twice; who would be refused for that waits until it is done.
//!
//! A name takes room in the domain of its directory, and that is looked at; one that is moved there, too, unless it replaces
//! another, and a whiteout that stays under the old name. Does not promise it of a new inode that goes to another domain, as
//! directories do: there a few blocks of the volume's own are left to it. Nor of the new name where the whiteout's domain is
//! another one, and had to be waited for.

use super::*;
use crate::abi::{self, op};
use crate::fs::MAX_IO_BYTES;
use crate::pace::LOCKED_WAIT;
use crate::request::OwnedRequest;
use crate::within_quota::taking::TakingQuota;

/// What a name may take: a block of the directory, another where that is split, those of the tables that tell of the two and of the
/// inode.
const NAME_BLOCKS: u64 = 8;
/// Longest that a `write` waits for requests that take room, and for other `write`s, before it is refused.
pub(super) const TAKES: Duration = Duration::from_secs(10);

/// Blocks that a request takes, until this is dropped, and what was cloned of it.
#[derive(Debug, Default, Clone)]
pub(crate) struct Taking {
    _taken: Option<Arc<Taken>>,
}

/// See [`Taking`].
#[derive(Debug)]
struct Taken {
    /// Those of the domain.
    all: Arc<CachePadded<AtomicU64>>,
    blocks: u64,
}

impl Taking {
    pub(super) fn of(domain: &Domain, blocks: u64) -> Self {
        domain.taking.fetch_add(blocks, Ordering::SeqCst);
        Self { _taken: Some(Arc::new(Taken { all: domain.taking.clone(), blocks })) }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.all.fetch_sub(self.blocks, Ordering::SeqCst);
    }
}

/// Until this is dropped, the domain does not cease to be tight: what the kernel takes is known.
struct Taker(Arc<AtomicUsize>);

impl Taker {
    fn of(domain: &Domain) -> Self {
        domain.takers.fetch_add(1, Ordering::SeqCst);
        Self(domain.takers.clone())
    }
}

impl Drop for Taker {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A request for which there is too little beside what the kernel may hold.
struct Beside {
    domain: usize,
    ino: InodeNo,
    need: u64,
    req: OwnedRequest,
    later: Later,
    /// Since it is known what the kernel holds.
    since: Instant,
    /// It waits no longer.
    until: Option<Instant>,
    /// How often it was looked for room.
    tries: u32,
    /// When the domain became tight for this, if what was under way then is not written back yet.
    became: Option<Instant>,
    /// What it takes of its owners' limits, where that was looked at before.
    quota: Option<TakingQuota>,
    _taker: Taker,
    _waiting: Waiting,
}

impl Beside {
    /// Whether it is refused now where there is no room: never at the first look, however long that was in coming.
    fn is_late(&self) -> bool {
        self.tries > 1 && self.until.is_some_and(|until| until <= Instant::now())
    }
}

impl BraidFs {
    /// Lets a request take so many blocks of the file's domain at most, beside what the kernel may hold of it. Else how it goes on:
    /// a helper thread makes room first, and has it handled again.
    pub(crate) fn take_room(
        &self,
        req: &Request<'_>,
        ino: InodeNo,
        need: u64,
        cx: &Context<'_>,
    ) -> Result<Taking, Handled> {
        let few = need.saturating_mul(4096) < UNSEEN_BYTES && !self.is_tight(ino);
        if need == 0 || few {
            Ok(Taking::default())
        } else {
            self.take_blocks(req, ino, (need, SLACK_BLOCKS), None, cx)
        }
    }

    /// The same for a request that makes a name in this directory, or an attribute of this inode, and so many `bytes` with it. Nobody
    /// looks as long as the domain is not tight: it has far more than what these take until somebody does.
    pub(crate) fn take_room_for_name(
        &self,
        req: &Request<'_>,
        ino: InodeNo,
        bytes: usize,
        cx: &Context<'_>,
    ) -> Result<Taking, Handled> {
        if !self.is_tight(ino) {
            return Ok(Taking::default());
        }
        let longest = self.longest_for_name(req, cx.channel);
        self.take_blocks(req, ino, ((bytes as u64).div_ceil(4096), NAME_BLOCKS), longest, cx)
    }

    /// How long a request that makes a name waits for room at most, where the lock that the kernel holds meanwhile is in the way of
    /// others: over the mount that tenants share, and for a rename to another directory, which has a lock of the whole mount.
    fn longest_for_name(&self, req: &Request<'_>, channel: &Channel) -> Option<Duration> {
        let of_mount = matches!(req.head.opcode, op::RENAME | op::RENAME2)
            && req.arg::<abi::RenameIn>().is_ok_and(|arg| WireId(arg.newdir) != req.node());
        let shared = || (0..self.domain_count()).any(|d| self.is_limited(d));
        (channel.own().is_none() && (of_mount || shared())).then_some(LOCKED_WAIT)
    }

    /// Takes `need` blocks for a request, and so many `besides` that it may have to have. It waits for `longest` at most.
    fn take_blocks(
        &self,
        req: &Request<'_>,
        ino: InodeNo,
        (need, besides): (u64, u64),
        longest: Option<Duration>,
        cx: &Context<'_>,
    ) -> Result<Taking, Handled> {
        if cx.room().is_some() || self.profile.cache == Cache::Through {
            return Ok(Taking::default());
        }
        let Some(domain) = self.domain_index(ino) else { return Ok(Taking::default()) };
        let need = need.saturating_add(besides);
        if let Some(taking) = self.take_beside(domain, need, None) {
            return Ok(taking);
        }
        // what cannot be had at all is refused by the volume: nothing is written back for it
        if need - besides > self.vol.statfs().free {
            return Ok(Taking::default());
        }
        // before it waits in others' way
        if longest.is_some()
            && let Some(taking) = self.take_at_once(domain, ino, need)
        {
            return Ok(taking);
        }
        // who writes past the cache by asynchronous calls has as many WRITEs under way as the kernel hands out at a time
        let Some(waiting) = self.let_wait(req.head.opcode == op::WRITE) else {
            return self.take_at_once(domain, ino, need).ok_or(Err(Errno::NOSPC));
        };
        let beside = Beside {
            domain,
            ino,
            need,
            req: req.detach(),
            later: cx.later(),
            since: Instant::now(),
            until: longest.map(|longest| Instant::now() + longest),
            tries: 0,
            became: None,
            quota: cx.quota().cloned(),
            _taker: Taker::of(&self.tight.domains[domain]),
            _waiting: waiting,
        };
        // A job that cannot be handed over is dropped, and answers EIO.
        self.jobs.send(Kind::Room, Whose::Mount, move |fs| fs.make_room_beside(beside));
        Err(Ok(Outcome::Deferred))
    }

    /// Takes blocks, where the domain has them beside what the kernel may hold of it: see [`Self::floor_of`] for `written`.
    pub(super) fn take_beside(&self, d: usize, need: u64, written: Option<Instant>) -> Option<Taking> {
        let domain = &self.tight.domains[d];
        // before anything is looked at: who looks after this sees it
        let taking = Taking::of(domain, need);
        let all = || domain.taking.load(Ordering::SeqCst);
        if !domain.tight.load(Ordering::SeqCst) {
            let room = self.vol.sure_room(DomainId(d as u16));
            return (room >= all().saturating_add(domain.tight_below())).then_some(taking);
        }
        if domain.unknown.load(Ordering::SeqCst) {
            return None;
        }
        let mut floor = 0;
        self.dirty_grants.tell(|granted| floor = self.floor_of(d, granted, written));
        let fits = || self.vol.own_room(DomainId(d as u16)) >= all().saturating_add(floor);
        (floor == 0 || fits()).then_some(taking)
    }

    /// Takes blocks for a request that must not wait, since too many do already: where the domain has them, or gets groups for them,
    /// beside what the kernel may hold of it.
    fn take_at_once(&self, d: usize, ino: InodeNo, need: u64) -> Option<Taking> {
        let domain = &self.tight.domains[d];
        let taking = Taking::of(domain, need);
        let mut floor = self.enough(ino);
        if domain.tight.load(Ordering::SeqCst) && !domain.unknown.load(Ordering::SeqCst) {
            self.dirty_grants.tell(|granted| floor = floor.min(self.floor_of(d, granted, None)));
        }
        let want = domain.taking.load(Ordering::SeqCst).saturating_add(floor);
        self.vol.claim_room(ino, want).is_ok_and(|own| own >= want).then_some(taking)
    }

    /// What the kernel may hold of a tight domain, where so many blocks are granted by now; with OPEN, where it was `written` back
    /// from then on: to be asked for under the lock of the grants. Who was told to go on before that, and not long before, may store
    /// its bytes yet; where somebody was told so since, it may be as much as ever.
    fn floor_of(&self, d: usize, granted: u64, written: Option<Instant>) -> u64 {
        if !self.negotiated.opens() {
            return granted;
        }
        let domain = &self.tight.domains[d];
        let Some(written) = written else { return domain.kept.load(Ordering::SeqCst) };
        match self.handles.promised_before(written, |ino| self.domain_index(ino) == Some(d)) {
            None => domain.held.load(Ordering::SeqCst),
            Some(0) => 0,
            Some(lately) => LAST_BLOCKS.max(lately * WRITE_BLOCKS),
        }
    }

    /// Whether requests are taking room of the domain just now, so that it may have more than it seems.
    pub(super) fn is_taking(&self, domain: Option<usize>, since: Instant) -> bool {
        let taking = |d: usize| self.tight.domains[d].taking.load(Ordering::SeqCst) > 0;
        domain.is_some_and(taking) && since.elapsed() < TAKES
    }

    /// Blocks that requests are taking, of all domains.
    #[cfg(test)]
    pub(crate) fn tight_taking(&self) -> u64 {
        self.tight.domains.iter().map(|d| d.taking.load(Ordering::SeqCst)).sum()
    }

    /// Makes room for a request, and has it handled; or goes on with that when other jobs about room are done, which call
    /// this only.
    fn make_room_beside(&self, mut b: Beside) {
        let (d, ino, need) = (b.domain, b.ino, b.need);
        b.tries += 1;
        let (domain, channel) = (&self.tight.domains[d], b.later.channel().clone());
        match b.became {
            None => {
                if let Some(taking) = self.take_beside(d, need, None) {
                    return self.handle_beside(b, taking);
                }
                let tight = domain.tight.load(Ordering::SeqCst);
                if !tight || domain.unknown.load(Ordering::SeqCst) {
                    if self.tight.becomes_tight(d) {
                        self.begin_tight(d, &channel);
                    }
                    self.write_back_first(d, &channel);
                    b.became = Some(Instant::now());
                    return self.wait_beside(b);
                }
            }
            Some(at) if at.elapsed() < IN_FLIGHT && !b.is_late() => return self.wait_beside(b),
            Some(_) => {
                self.write_back_first(d, &channel);
                (b.became, b.since) = (None, Instant::now());
            }
        }
        self.restrict_again(d);
        // groups that it can have come first: nothing need be written back for them
        if self.claim_beside_granted(ino, need)
            && let Some(taking) = self.take_beside(d, need, None)
        {
            return self.handle_beside(b, taking);
        }
        let (written, left) = if self.negotiated.opens() {
            (Some(self.write_back_promised(d, &channel)), Left::default())
        } else {
            // it is in another call now
            self.dirty_grants.has_stored(b.req.get().head.pid);
            (None, self.write_back_granted(Some(locked_by(&b.req.get(), ino)), &channel))
        };
        if let Some(taking) = self.take_beside(d, need, written) {
            return self.handle_beside(b, taking);
        }
        if (b.tries == 1 || b.since.elapsed() < self.patience(left, ino, need)) && !b.is_late() {
            return self.wait_beside(b);
        }
        let mut want = need;
        self.dirty_grants.tell(|granted| want = want.saturating_add(self.floor_of(d, granted, written)));
        if let Err(e) = self.find_room(ino, want, &channel) {
            return b.later.done(Err(errno(e)));
        }
        match self.take_beside(d, need, written) {
            Some(taking) => self.handle_beside(b, taking),
            None if self.is_taking(Some(d), b.since) && !b.is_late() => self.wait_beside(b),
            None => b.later.done(Err(Errno::NOSPC)),
        }
    }

    fn wait_beside(&self, b: Beside) {
        std::thread::sleep(pause(b.since));
        // as above
        self.jobs.send(Kind::Room, Whose::Mount, move |fs| fs.make_room_beside(b));
    }

    /// Has a request handled that may take its room now. Not here: it may take long, and others ask for room.
    fn handle_beside(&self, b: Beside, taking: Taking) {
        let whose = Whose::of(&b.req.get(), b.later.channel());
        self.jobs.send(Kind::Requests, whose, move |fs| {
            let Beside { req, later, quota, _taker, _waiting, .. } = b;
            let (req, cx) = (req.get(), later.context().with_room(taking).with_quota(quota));
            let mut out = Answer::new(MAX_IO_BYTES as usize);
            let handled = fs.serve_on_helper(&req, &mut out, &later, &cx);
            drop(cx);
            fs.answer_later(&req, handled, later, &mut out);
        });
    }

    /// Has the kernel write back what it was promised room for in this domain, on a mount with OPEN; from when on. In jobs
    /// about room only.
    pub(super) fn write_back_promised(&self, domain: usize, channel: &Channel) -> Instant {
        let begun = Instant::now();
        let files = self.handles.take_promised_but_lately(IN_FLIGHT, |ino| self.domain_index(ino) == Some(domain));
        files.iter().for_each(|id| _ = self.drop_pages(*id, None, channel));
        self.keep_room(domain);
        begun
    }
}

/// The file whose lock the kernel holds for a request that takes room of this inode's domain.
fn locked_by(req: &Request<'_>, ino: InodeNo) -> InodeNo {
    match req.head.opcode {
        // the inode is the directory
        op::LINK => req.arg::<abi::LinkIn>().map_or(ino, |arg| WireId(arg.oldnodeid).ino()),
        _ => ino,
    }
}
