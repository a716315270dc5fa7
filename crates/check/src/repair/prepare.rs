//! Makes a volume that was not unmounted ready for the replay of its journals, and replays them.
//!
//! A replay trusts the tables that it starts from. So what is damaged in them is mended first: a node table that lost a
//! copy is brought up to date from the node blocks; the blocks of a group whose segment table lost one are counted, and
//! where that cannot be, it gives out none until the check has counted them; of one whose owner table lost one nothing
//! is freed by a count. Where the sum in the domain's header says that the segment tables are those of its last
//! checkpoint, and these that a table was written as often as it was, the copy that does not hold is the one that did
//! not count: the crash tore it. A journal with a gap is cut there, and the inodes whose changes are lost are named.

use crate::codes;
use crate::error::Result;
use crate::model::Model;
use crate::parts::domain::{Domain, Group};
use crate::repair::watched::WatchedDevice;
use crate::report::{Finding, Log};
use crate::rules::group::{has_owners, owners};
use crate::rules::space::in_journal;
use crate::scan::space::{Used, expected, segment_entry};
use crate::scan::{nodes, tables, volume};
use braidfs_device::{BLOCK_BYTES, Device};
use braidfs_format::domain::{CLEAN, DomainHeader, FAILED, PEER_FAILED};
use braidfs_format::geometry::SEGMENT_BLOCKS;
use braidfs_format::group::{OWNERS_PER_BLOCK, Owner, SegmentEntry, SegmentKind, Temperature};
use braidfs_format::journal::{Chunk, ChunkKind, RecordRef, TableRecord};
use braidfs_format::node::{FOUND, NodeEntry};
use braidfs_format::{BlockAddr, DomainId, NodeId};
use braidfs_store::Store;
use braidfs_store::interface::{Replay, ReplayError};
use braidfs_store::ring::{AsItIs, Ring};
use braidfs_sync::workers::Workers;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// What the preparation leaves for the check.
#[derive(Debug, Default)]
pub struct Prepared {
    /// What was found, and mended for the replay.
    pub log: Log,
    /// Nodes found again, per domain.
    pub recovered: HashMap<u16, HashSet<NodeId>>,
    /// Groups all of whose blocks were taken for valid: the check counts them.
    pub doubted: HashSet<u32>,
    /// Traces of the crash that might be damage.
    pub notes: Vec<String>,
    /// Domains that have failed, with nothing to replay: a replay leaves them alone.
    left_alone: Vec<u16>,
    /// Domains in which something was found: their headers say that a repair goes on, also behind the replay.
    pub marked: BTreeSet<u16>,
    /// Findings are told before what told of them goes.
    tells: bool,
}

/// Mends what a replay needs and replays the journals on `devices`. Where one cannot be written, nothing of the journals is given up:
/// they may hold. `tells`: what is given up for good goes to the log first, as nobody finds it again where this is cut off.
///
/// # Errors
/// Of a device, or no volume; with what was found until then.
pub fn run(devices: &[Arc<dyn Device>], replay: &dyn Replay, tells: bool) -> Result<Prepared> {
    let watched: Vec<Arc<WatchedDevice>> = devices.iter().map(|d| Arc::new(WatchedDevice::new(d.clone()))).collect();
    let devices: Vec<Arc<dyn Device>> = watched.iter().map(|w| w.clone() as Arc<dyn Device>).collect();
    let mut p = Prepared { tells, ..Prepared::default() };
    let done =
        replay_what_holds(&devices, replay, &mut p, &|| Ok(watched.iter().try_for_each(|w| w.check_written())?));
    match done {
        Ok(()) => Ok(p),
        Err(e) => Err(e.after(p.log.findings)),
    }
}

fn replay_what_holds(
    devices: &[Arc<dyn Device>],
    replay: &dyn Replay,
    p: &mut Prepared,
    check_written: &dyn Fn() -> Result<()>,
) -> Result<()> {
    tables_first(devices, p)?;
    super::prepare_replay(devices)?;
    note_chunks(devices, p)?;
    let Err(first) = replay_and_note(devices, replay, p)? else { return Ok(()) };
    check_written()?;
    tracing::info!("the journals cannot be replayed as they are: {first}");
    cut_journals(devices, p)?;
    let Err(e) = replay_and_note(devices, replay, p)? else { return Ok(()) };
    check_written()?;
    p.log.domain = None;
    p.log.add(codes::REPLAY_FAILED, None, format!("{e}: every journal is replayed by itself"));
    replay_tables(devices, replay, p, check_written)
}

/// [`replay_volume`], whose traces are noted.
fn replay_and_note(
    devices: &[Arc<dyn Device>],
    replay: &dyn Replay,
    p: &mut Prepared,
) -> Result<std::result::Result<(), ReplayError>> {
    Ok(replay_volume(devices, replay, p)?.map(|traces| p.note(traces)))
}

/// Replays the journals of all domains. Where one has failed, and is left alone, the unmount tells so, and has left the others as it
/// should.
fn replay_volume(
    devices: &[Arc<dyn Device>],
    replay: &dyn Replay,
    p: &Prepared,
) -> Result<std::result::Result<Vec<String>, ReplayError>> {
    let replayed = replay.replay_volume(devices);
    if replayed.is_err() && !p.left_alone.is_empty() {
        let m = volume::read(devices)?;
        if !m.domains.iter().any(|d| is_unreplayed(&m.store, d)) {
            return Ok(Ok(Vec::new()));
        }
    }
    Ok(replayed)
}

impl Prepared {
    /// What a replay tells: of the chunks that [`note_chunks`] has told of, and of the data that came with them.
    fn note(&mut self, traces: Vec<String>) {
        for t in traces {
            if !self.notes.contains(&t) {
                self.notes.push(t);
            }
        }
    }

    /// What was found in a domain of whose journal something is about to go: it is told, and the header of the domain says that a
    /// repair goes on.
    fn before_it_goes(&mut self, m: &mut Model, i: usize, log: &mut Log) -> Result<()> {
        if self.tells {
            tell(&log.findings);
        }
        self.log.findings.append(&mut log.findings);
        self.marked.insert(m.domains[i].number);
        super::mark_repair(&m.store, &m.sb, &mut m.domains[i])
    }
}

/// Tells the log what no later check finds, where this one is cut off.
pub fn tell<'f>(findings: impl IntoIterator<Item = &'f Finding>) {
    for f in findings {
        let domain = f.domain.map_or_else(String::new, |d| format!(" domain {d}"));
        let node = f.node.map_or_else(String::new, |n| format!(" node {n}"));
        tracing::error!("E{:03}{domain}{node}: {}", f.code, f.message);
    }
}

fn is_dirty(d: &Domain) -> bool {
    d.header.is_some_and(|h| h.flags.get() & CLEAN == 0)
}

/// Whether its journal may hold what its tables do not. Where a checkpoint passed the failure of another domain, the header says after a
/// replay, too, that the domain is in use, as long as not all links were compared.
pub fn is_unreplayed(store: &Arc<Store>, d: &Domain) -> bool {
    let Some((ring, h)) = journal_of(store, d) else { return false };
    let replayed = |c: &Chunk| c.tx.0 <= h.checkpointed_tx.get();
    h.flags.get() & PEER_FAILED == 0 || !scan(&ring, &h).is_ok_and(|(chunks, _)| chunks.iter().all(replayed))
}

/// Whether it is to be mended before a replay: it has something to replay, a repair of it was cut off, or its header does not hold,
/// which the replay believes.
fn is_open(d: &Domain) -> bool {
    is_dirty(d) || d.header_dirty && d.header.is_some()
}

/// Makes the header of `domain` again where it is lost, so that what other domains have in their journals can be replayed: as that
/// of a domain that has failed, of which a replay changes nothing. What its own journal holds is given up. Whether it has one.
fn make_header(store: &Store, log: &mut Log, domain: &mut Domain) -> bool {
    super::rebuild_header(store, domain);
    name_given_up(store, domain, log);
    let Some(h) = &mut domain.header else { return false };
    // no table may look unfinished
    h.checkpoint = domain.groups.values().map(|g| g.written.checkpoint).max().unwrap_or(0).into();
    true
}

/// Mends the tables of the groups of all domains that are open, or whose headers are lost. Where something was found, the header
/// says from here on that a repair goes on, and nodes that were found again are marked: a check that is cut off later than the
/// replay would else find nothing, and not know which inodes may have been deleted.
fn tables_first(devices: &[Arc<dyn Device>], p: &mut Prepared) -> Result<()> {
    let mut m = volume::read(devices)?;
    p.log.findings.append(&mut m.log.findings);
    let store = Arc::clone(&m.store);
    for h in m.domains.iter().filter_map(|d| d.header).filter(DomainHeader::is_discarded) {
        p.notes.push(format!(
            "domain {}: tenant {:?} has no journal and was in use when the volume stopped: it is empty",
            h.domain,
            h.tenant_name_str()
        ));
    }
    let sb = m.sb;
    for domain in m.domains.iter_mut().filter(|d| is_open(d) || d.header.is_none()) {
        let mut log = Log::of(domain.number);
        tables::read_groups(&store, &mut log, domain, &m.bat);
        tables::take_found(&store, domain);
        tables::recover_entries(&store, &mut log, domain, false);
        let lost = domain.header.is_none();
        if lost && !make_header(&store, &mut log, domain) {
            continue;
        }
        if lost && p.tells {
            // once the header is written, the journal goes on behind all that it holds
            let of_it = |f: &&Finding| f.domain == Some(domain.number);
            tell(p.log.findings.iter().filter(of_it).chain(&log.findings).filter(|f| codes::goes_with_journal(f.code)));
        }
        let journal = domain.journal();
        let counted = match domain.groups.values().any(is_unknown) {
            true => count_blocks(devices, domain.number)?,
            false => Counted::default(),
        };
        for group in domain.groups.values_mut() {
            if doubt_space(&store, &mut log, journal, group, &counted) {
                p.doubted.insert(group.number);
            }
        }
        if lost || domain.header.is_some_and(|h| h.flags.get() & (FAILED | CLEAN) == FAILED | CLEAN) {
            p.left_alone.push(domain.number);
        }
        tables::mark_found(&store, domain);
        // a lost one is written last: before that it is lost still
        if !lost {
            super::begin_mending(&store, &sb, domain)?;
        }
        let upto = domain.header.map_or(0, |h| h.checkpoint.get());
        for group in domain.groups.values() {
            super::write_tables(&store, domain.number, group, upto)?;
        }
        p.recovered.entry(domain.number).or_default().extend(domain.recovered.drain());
        p.log.findings.append(&mut log.findings);
    }
    store.flush()?;
    // the headers tell of the segment tables
    let old = |d: &Domain| d.groups.values().any(|g| g.counts_wrong);
    let sound = m.domains.iter().filter(|d| is_open(d) && !old(d)).map(|d| d.number).collect();
    torn_copies(p, &sound);
    for i in (0..m.domains.len()).filter(|&i| is_open(&m.domains[i])).collect::<Vec<_>>() {
        let d = &m.domains[i];
        let found = p.log.findings.iter().any(|f| f.domain == Some(d.number));
        let doubted = d.groups.keys().any(|g| p.doubted.contains(g));
        let recovered = p.recovered.get(&d.number).is_some_and(|r| !r.is_empty());
        let goes_on = p.left_alone.contains(&d.number) || found || doubted || recovered;
        if goes_on {
            p.marked.insert(d.number);
        }
        super::end_mending(&mut m, i, goes_on)?;
    }
    store.flush()?;
    Ok(())
}

/// One copy of a pair that does not hold, in a domain of `sound`, is what a checkpoint leaves that the crash cut off: it
/// writes the copy that does not count. That is no error, and mended all the same; it is one where anything else in the
/// domain's tables does not hold. A copy of the domain's header is one, too: which of the two counted nothing else tells.
fn torn_copies(p: &mut Prepared, sound: &BTreeSet<u16>) {
    let torn = [codes::GROUP_COPY, codes::SEGMENTS_COPY, codes::OWNERS_COPY, codes::NODES_COPY];
    let damaged: BTreeSet<u16> =
        p.log.findings.iter().filter(|f| !torn.contains(&f.code)).filter_map(|f| f.domain).collect();
    let is_trace = |d: u16| sound.contains(&d) && !damaged.contains(&d);
    let found = std::mem::take(&mut p.log.findings).into_iter();
    let (traces, findings): (Vec<Finding>, _) =
        found.partition(|f| torn.contains(&f.code) && f.domain.is_some_and(is_trace));
    p.log.findings = findings;
    p.notes.extend(
        traces.into_iter().map(|f| {
            format!("domain {}: {}: cut off by the crash, or damaged", f.domain.unwrap_or_default(), f.message)
        }),
    );
}

/// Segment tables of groups, made again from what refers to their blocks.
type Counted = BTreeMap<u32, Vec<SegmentEntry>>;

/// Whether nobody knows which blocks of a group are in use, but by what refers to them.
fn is_unknown(group: &Group) -> bool {
    group.segments.is_none() || group.segments_doubtful
}

/// Counts the blocks of a domain of which segment tables are lost or may be old, for a replay, which needs some to
/// write what was synced: where all its node tables and inodes hold. What the journal tells of, a replay takes before
/// it takes any other block.
fn count_blocks(devices: &[Arc<dyn Device>], number: u16) -> Result<Counted> {
    let mut m = volume::read(devices)?;
    let Some(at) = m.domains.iter().position(|d| d.number == number) else { return Ok(Counted::default()) };
    let mut domain = m.domains.swap_remove(at);
    tables::read_groups(&m.store, &mut Log::default(), &mut domain, &m.bat);
    let holds = |g: &Group| g.lost.is_empty() && g.doubtful.is_empty();
    let is_found = |g: &Group| g.entries.used().any(|(_, e)| e.flags & FOUND != 0);
    if domain.header.is_none() || domain.groups.values().any(|g| !holds(g) || is_found(g)) {
        return Ok(Counted::default());
    }
    let mut log = Log::of(number);
    let (inodes, _) = nodes::read(&m.store, &mut log, &mut domain, m.inodes.like());
    if !log.findings.is_empty() {
        return Ok(Counted::default());
    }
    let used = Used::of(&domain, &inodes);
    let count = |group: &Group| {
        let e = expected(&m.store, &domain, group, &used.group(&m.store, group.number));
        (group.number, (0..m.store.geometry().segments).map(|i| segment_entry(&e, i, group, None)).collect())
    };
    Ok(domain.groups.values().filter(|g| is_unknown(g)).map(count).collect())
}

/// Where a segment table of `group` is lost or may be old, its blocks are taken for valid that were `counted`, or all.
/// Whether that is so, or an owner table is lost or may be old: what that counted is not known then.
fn doubt_space(
    store: &Store,
    log: &mut Log,
    journal: Option<(u64, u64)>,
    group: &mut Group,
    counted: &Counted,
) -> bool {
    let g = store.geometry();
    let unknown = is_unknown(group);
    let mut doubt = unknown;
    for half in 0..2 * g.segments {
        let addr = g.owners_addr(group.number, half / 2, half % 2);
        let pair = log.read(store, addr, 2);
        let mut mend = std::mem::take(&mut group.mend);
        let table = owners(store, log, &mut mend, group, half, &pair);
        group.mend = mend;
        group.counts_wrong |= table.old;
        let may_be_old = (table.old || table.damaged && !group.segments_proven) && has_owners(group, half);
        doubt |= may_be_old || table.owners.is_none();
        if may_be_old || table.owners.is_none() {
            // a count that is too low would have the replay free a block in use
            let mut owners = table.owners.unwrap_or_else(|| vec![Owner::default(); OWNERS_PER_BLOCK as usize]);
            owners.iter_mut().for_each(|o| o.live = 0);
            group.owners_lost.push((half, owners));
        }
    }
    if !unknown {
        return doubt;
    }
    group.segments_dirty = true;
    if let Some(segments) = counted.get(&group.number) {
        group.segments = Some(segments.clone());
        return true;
    }
    let mut segments = group.segments.take().unwrap_or_default();
    segments.resize(g.segments as usize, SegmentEntry { temperature: Temperature::Warm, ..SegmentEntry::default() });
    for (i, s) in (0u32..).zip(&mut segments) {
        let from = g.segment_start(group.number, i).0;
        s.valid = [u64::MAX; 8];
        if i * SEGMENT_BLOCKS >= group.blocks {
            s.kind = SegmentKind::Absent;
        } else if in_journal(journal, from) {
            s.kind = SegmentKind::Journal;
        } else if matches!(s.kind, SegmentKind::Free | SegmentKind::Absent) {
            s.kind = SegmentKind::Data;
        }
    }
    group.segments = Some(segments);
    true
}

/// Replays the committed transactions of each domain by itself, into its tables only: what was synced since the last of
/// them is given up and named. Names are left to the check.
fn replay_tables(
    devices: &[Arc<dyn Device>],
    replay: &dyn Replay,
    p: &mut Prepared,
    check_written: &dyn Fn() -> Result<()>,
) -> Result<()> {
    let mut m = volume::read(devices)?;
    for i in (0..m.domains.len()).filter(|i| is_dirty(&m.domains[*i])).collect::<Vec<_>>() {
        let mut log = Log::of(m.domains[i].number);
        p.before_it_goes(&mut m, i, &mut log)?;
        let done = replay_domain(&m, replay, &m.domains[i], &mut log);
        match done {
            Ok(Some(closed)) => {
                p.before_it_goes(&mut m, i, &mut log)?;
                super::close_journal(&m, &m.domains[i], closed)?;
            }
            Ok(None) => {}
            Err(e) => {
                check_written()?;
                log.add(codes::REPLAY_FAILED, None, format!("the journal cannot be replayed ({e}) and is given up"));
                name_ring(&m.store, &m.domains[i], &mut log);
                p.before_it_goes(&mut m, i, &mut log)?;
                super::give_up_journal(&m, &m.domains[i])?;
            }
        }
    }
    Ok(())
}

/// Replays the journal of `d` into its tables: the header that is to be written then.
fn replay_domain(
    m: &Model,
    replay: &dyn Replay,
    d: &Domain,
    log: &mut Log,
) -> Result<Option<DomainHeader>, ReplayError> {
    let Some((ring, mut h)) = journal_of(&m.store, d) else { return Ok(None) };
    let id = DomainId(d.number);
    let groups: Vec<u32> = (0u32..).zip(&m.bat).filter(|(_, e)| e.domain == Some(id)).map(|(g, _)| g).collect();
    let (chunks, end) = scan(&ring, &h)?;
    let last = replay.replay_tables(&m.store, id, &groups, &chunks, &mut h)?;
    let later = chunks.iter().filter(|c| c.tx.0 > last);
    name(log, later.flat_map(|c| nodes_of(c).collect::<Vec<_>>()).collect());
    let newest = chunks.iter().map(|c| c.tx.0).max().unwrap_or(0).max(last);
    (h.head_pos, h.tail_pos) = (end.into(), end.into());
    // what is repaired is written by a transaction whose number nobody has used
    h.last_tx = h.first_tx(newest).into();
    h.checkpointed_tx = h.last_tx;
    Ok(Some(h))
}

/// The journal of a domain that has something to replay, and its header.
fn journal_of(store: &Arc<Store>, d: &Domain) -> Option<(Ring, DomainHeader)> {
    let h = d.header.filter(|h| h.flags.get() & CLEAN == 0)?;
    Some((Ring::new(Arc::clone(store), DomainId(d.number), &h), h))
}

/// The chunks in a journal, as [`Ring::scan`] finds them.
fn scan(ring: &Ring, h: &DomainHeader) -> Result<(Vec<Chunk>, u64)> {
    Ok(ring.scan(h.tail_pos.get(), &Workers::available(), &AsItIs)?)
}

/// The nodes that a chunk is about.
fn nodes_of(c: &Chunk) -> impl Iterator<Item = NodeId> + '_ {
    c.records.iter().filter_map(|r| match r {
        RecordRef::Table(TableRecord::Node { node, .. }) => Some(node),
        RecordRef::Full(r) => Some(r.owner.node()),
        RecordRef::Remote { child, .. } => Some(child.node()),
        _ => None,
    })
}

/// Position and number of the first transaction that cannot be replayed, as recovery would find it.
fn gap(chunks: &[Chunk], last: u64) -> Option<u64> {
    let by_pos: HashMap<u64, &Chunk> = chunks.iter().map(|c| (c.pos, c)).collect();
    let mut commits: Vec<&Chunk> = chunks.iter().filter(|c| c.kind == ChunkKind::Commit).collect();
    commits.sort_by_key(|c| c.tx);
    let mut newest = last;
    for c in commits {
        let holds = c.records.iter().all(|r| match r {
            RecordRef::After(tx) => tx.0 <= newest,
            RecordRef::Part { pos, crc } => {
                by_pos.get(&pos).is_some_and(|p| p.crc == crc && p.tx == c.tx && p.kind == ChunkKind::Stream)
            }
            _ => false,
        });
        if !holds && c.tx.0 > last {
            return Some(c.tx.0);
        }
        newest = newest.max(c.tx.0);
    }
    None
}

/// Cuts journals at their first gap: what comes later is zeroed, and its nodes are named.
fn cut_journals(devices: &[Arc<dyn Device>], p: &mut Prepared) -> Result<()> {
    let mut m = volume::read(devices)?;
    for i in 0..m.domains.len() {
        let d = &m.domains[i];
        let Some((ring, h)) = journal_of(&m.store, d) else { continue };
        let mut log = Log::of(d.number);
        let Ok((chunks, _)) = scan(&ring, &h) else {
            log.add(codes::DOMAIN_OLD, None, "the newest domain header is lost; the journal is given up");
            name_ring(&m.store, d, &mut log);
            p.before_it_goes(&mut m, i, &mut log)?;
            super::give_up_journal(&m, &m.domains[i])?;
            continue;
        };
        let Some(tx) = gap(&chunks, h.last_tx.get()) else { continue };
        let lost: Vec<&Chunk> = chunks.iter().filter(|c| c.tx.0 >= tx).collect();
        log.add(codes::REPLAY_FAILED, None, format!("transaction {tx} and what follows it cannot be replayed"));
        let named: BTreeSet<NodeId> = lost.iter().flat_map(|c| nodes_of(c)).collect();
        name(&mut log, named);
        p.before_it_goes(&mut m, i, &mut log)?;
        for c in lost {
            m.store.write(ring.addr(c.pos), &vec![0u8; c.blocks as usize * BLOCK_BYTES])?;
        }
        m.store.flush()?;
    }
    Ok(())
}

fn name(log: &mut Log, nodes: BTreeSet<NodeId>) {
    for n in nodes {
        log.add(codes::CHANGES_LOST, Some(n), "its newest changes were in the journal and are given up");
    }
}

/// Names the nodes of all chunks that lie in a journal, from wherever they are.
fn name_ring(store: &Arc<Store>, d: &Domain, log: &mut Log) {
    let Some(h) = d.header else { return };
    let named = ring_chunks(store, d.number, &h)
        .iter()
        .filter(|c| c.tx.0 > h.checkpointed_tx.get())
        .flat_map(|c| nodes_of(c).collect::<Vec<_>>())
        .collect();
    name(log, named);
}

/// Names the nodes whose newest change stands in the journal of a domain whose header was lost, and not in its tables.
/// How far the last checkpoint went is not known any more, so the tables tell: what a commit wrote is in them or lost,
/// and a synced node without a later commit is lost.
pub fn name_given_up(store: &Store, d: &Domain, log: &mut Log) {
    let Some(h) = d.header else { return };
    let mut chunks = ring_chunks(store, d.number, &h);
    chunks.sort_by_key(|c| c.pos);
    let mut newest: BTreeMap<NodeId, Option<NodeEntry>> = BTreeMap::new();
    for r in chunks.iter().flat_map(|c| &c.records) {
        match r {
            RecordRef::Table(TableRecord::Node { node, entry }) => newest.insert(node, Some(entry)),
            RecordRef::Full(r) => newest.insert(r.owner.node(), None),
            _ => None,
        };
    }
    let lost = |(node, entry): (NodeId, Option<NodeEntry>)| {
        let kept = entry.is_some_and(|e| d.entry(store, node).unwrap_or_default().is_same_record(&e));
        (!kept).then_some(node)
    };
    name(log, newest.into_iter().filter_map(lost).collect());
}

/// All whole chunks in a ring, at whatever position.
fn ring_chunks(store: &Store, domain: u16, h: &DomainHeader) -> Vec<Chunk> {
    let n = u64::from(h.journal_blocks.get());
    let mut ring = vec![0u8; n as usize * BLOCK_BYTES];
    for (i, b) in ring.chunks_mut(BLOCK_BYTES).enumerate() {
        if store.read(BlockAddr(h.journal_start.get() + i as u64), b).is_err() {
            b.fill(0);
        }
    }
    let mut out = Vec::new();
    for at in 0..n as usize {
        let rest = &ring[at * BLOCK_BYTES..];
        let pos = u64::from_le_bytes(rest[16..24].try_into().unwrap_or_default());
        if let Ok(c) = braidfs_format::journal::decode_chunk(rest, store.volume, DomainId(domain), pos) {
            out.push(c);
        }
    }
    out
}

/// Notes what lies in the journals and is no whole chunk, where a writer may have left one.
fn note_chunks(devices: &[Arc<dyn Device>], p: &mut Prepared) -> Result<()> {
    let m = volume::read(devices)?;
    for d in &m.domains {
        let Some((ring, h)) = journal_of(&m.store, d) else { continue };
        let Ok((chunks, end)) = scan(&ring, &h) else { continue };
        p.notes.extend(ring.traces(h.tail_pos.get(), &chunks, end, h.last_tx.get())?);
    }
    Ok(())
}

/// Sets what the preparation found again, for the check that follows.
pub fn hand_over(p: &mut Prepared, m: &mut Model) {
    for d in &mut m.domains {
        d.recovered.extend(p.recovered.remove(&d.number).unwrap_or_default());
        d.doubted.clone_from(&p.doubted);
        // one that is marked may have been so before, which was told
        let lost = |f: &Finding| codes::goes_with_journal(f.code) || f.code == codes::DOMAIN_FAILED;
        d.journal_lost &= !p.marked.contains(&d.number);
        d.journal_lost |= p.log.findings.iter().any(|f| lost(f) && f.domain.is_none_or(|n| n == d.number));
    }
}
