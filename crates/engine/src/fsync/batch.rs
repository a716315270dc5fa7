//! Files that are made durable together: what each needs is gathered, then written at once, then flushed once.
//!
//! Nobody waits for a commit while something is gathered and not written: the commit of its transaction waits for it
//! ([`crate::domain::tx::PendingIo`]). Of several files, those that would have to wait are put aside.

use crate::braid::durability::Reach;
use crate::cell::Cell;
use crate::domain::Domain;
use crate::domain::FailOnPanic;
use crate::domain::enter::{Enters, enter_all, try_enter_all};
use crate::domain::sync::{Ancestor, Batch, Prepared};
use crate::error::{Error, Result};
use crate::planted::{self, Bug};
use crate::types::*;
use crate::volume::MountedVolume;
use braidfs_format::journal::Record;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Of each batch, whether the journal had room for it.
type Fits = SmallVec<[bool; 1]>;

/// What an fsync of a file has to do.
pub(super) enum Gathered<'a> {
    /// Everything is durable already.
    Clean,
    /// Names or directories changed meanwhile: gather again.
    Changed,
    /// It needs a commit of its domain.
    Commit,
    /// A transaction of the file's domain must be durable first; then gather again.
    Wait(TxId),
    /// Written and flushed, it is done.
    Ready(Box<ToWrite<'a>>),
}

/// What makes a file durable, with new directories above it.
pub(super) struct ToWrite<'a> {
    /// What is in the batches is marked as changed no more. First, so that it is dropped first: a commit that waits for the batches
    /// must find its domain failed.
    panics: SmallVec<[FailOnPanic<'a>; 1]>,
    cell: Arc<Cell>,
    reach: Reach,
    batches: SmallVec<[(DomainId, Batch); 1]>,
    /// Directories, with the versions that will be durable.
    linked: Vec<(Arc<Cell>, u64)>,
}

impl MountedVolume {
    /// Gathers what makes the file durable. The caller holds its `sync` and neither a gate nor, with `may_wait`, anything
    /// gathered; without, an answer that there is no room in a journal is `Commit`.
    ///
    /// # Errors
    /// Of the device; the domain fails then.
    pub(super) fn gather(&self, c: &Arc<Cell>, data_only: bool, may_wait: bool) -> Result<Gathered<'_>> {
        let _spending = self.shared.spend(&self.dom(c.domain).budget);
        let path = self.pending_path(c)?;
        if !path.commit.is_empty() || !path.with.is_empty() {
            return Ok(Gathered::Commit);
        }
        let mut ids: SmallVec<[DomainId; 4]> = path.fresh.iter().map(|(d, _)| d.domain).collect();
        ids.push(c.domain);
        ids.sort_unstable();
        ids.dedup();
        let doms: SmallVec<[&Domain; 4]> = ids.iter().map(|d| &**self.dom(*d)).collect();
        let mut enters = Enters::new();
        if may_wait {
            enter_all(&doms, &mut enters)?;
        } else if !try_enter_all(&doms, &mut enters)? {
            return Ok(Gathered::Commit);
        }
        let own = enters.iter().find(|e| e.domain.id == c.domain).unwrap_or_else(|| unreachable!("own domain entered"));
        // The file last: once its record is gathered, it must be written.
        let ancestors: Option<Vec<Ancestor>> =
            path.fresh.iter().map(|(d, linked_at)| self.dom(d.domain).ancestor(d, *linked_at)).collect();
        let Some(ancestors) = ancestors else { return Ok(Gathered::Changed) };
        Ok(match self.dom(c.domain).prepare_sync(own, c, data_only, path.linked_at)? {
            Prepared::Changed => Gathered::Changed,
            Prepared::Clean if path.fresh.is_empty() => Gathered::Clean,
            Prepared::Clean | Prepared::Commit => Gathered::Commit,
            Prepared::Wait(tx) => Gathered::Wait(tx),
            Prepared::Batch(b, reach) => Gathered::Ready(Box::new(with_ancestors(c, *b, reach, ancestors, &enters))),
        })
    }

    /// Writes what was gathered and flushes. Of each whether it is durable; false where a journal has no room and a commit
    /// must do it.
    pub(super) fn write_gathered<'a>(&self, all: impl IntoIterator<Item = ToWrite<'a>>) -> SmallVec<[Result<bool>; 1]> {
        // those of a domain in one submission
        let mut by_domain: BTreeMap<DomainId, SmallVec<[(usize, Batch); 1]>> = BTreeMap::new();
        let mut files: SmallVec<[_; 1]> = SmallVec::new();
        let mut panics: SmallVec<[FailOnPanic<'_>; 2]> = SmallVec::new();
        for (i, w) in all.into_iter().enumerate() {
            let own = w.batches.iter().find(|(d, _)| *d == w.cell.domain).map(|(_, b)| b.tx());
            for (d, b) in w.batches {
                by_domain.entry(d).or_default().push((i, b));
            }
            files.push((w.cell, own, w.reach, w.linked));
            panics.extend(w.panics);
        }
        let mut results: SmallVec<[Result<bool>; 1]> = files.iter().map(|_| Ok(true)).collect();
        // of each domain the files that have a batch in it
        let (wrote, parts): (SmallVec<[_; 2]>, Vec<_>) = by_domain
            .into_iter()
            .map(|(d, batches)| {
                let (which, batches): (SmallVec<[usize; 1]>, SmallVec<[Batch; 1]>) = batches.into_iter().unzip();
                ((d, which), (d, batches))
            })
            .unzip();
        // all domains, also where one fails: the next commit of another one counts on its data
        for ((d, which), written) in wrote.iter().zip(self.write_domains(parts)) {
            match written {
                Ok(fits) => {
                    for (i, fits) in which.iter().zip(fits) {
                        if !fits && results[*i].is_ok() {
                            results[*i] = Ok(false);
                        }
                    }
                }
                Err(e) => self.give_error(e, *d, which.iter().copied(), &mut results),
            }
        }
        panics.into_iter().for_each(FailOnPanic::disarm);
        for ((cell, own, ..), _) in files.iter().zip(&results).filter(|(_, r)| matches!(r, Ok(false))) {
            if let Some(tx) = own {
                cell.state.write().durability.fsync_leaves_to_commit(*tx);
            }
        }
        // The device of one that failed may be gone: it is not flushed. It may have failed after this wrote to it, by what
        // another thread did: its files are not durable then.
        let mut going: SmallVec<[(DomainId, SmallVec<[usize; 1]>); 2]> = SmallVec::new();
        for (d, which) in wrote {
            match self.dom(d).check_failed() {
                Ok(()) => going.push((d, which)),
                Err(e) => self.give_error(e, d, which.into_iter(), &mut results),
            }
        }
        if !results.iter().any(|r| matches!(r, Ok(true))) {
            self.store.end_syncs();
            return results;
        }
        let ids: SmallVec<[DomainId; 2]> = going.iter().map(|(d, _)| *d).collect();
        // what each says is true of its own files: another one's device may be sound
        for ((d, which), flushed) in going.into_iter().zip(self.flush_domains(&ids)) {
            if let Err(e) = flushed {
                // what reached the device is unknown: no later fsync may claim it
                self.dom(d).fail(&e);
                self.give_error(e, d, which.into_iter(), &mut results);
            }
        }
        for ((cell, _, reach, linked), _) in files.iter().zip(&results).filter(|(_, r)| matches!(r, Ok(true))) {
            cell.state.write().durability.fsync_reaches(*reach);
            for (d, v) in linked {
                d.state.write().durability.fsync_below_reaches(*v);
            }
        }
        results
    }

    /// Writes batches of domains: where they lie on one device in one submission, else side by side (with `serial`: in their
    /// order). Of each whether it fits the journal.
    fn write_domains(&self, mut parts: Vec<(DomainId, SmallVec<[Batch; 1]>)>) -> Vec<Result<Fits>> {
        let one_device = self.store.devices() == 1;
        if parts.len() == 1 || (self.shared.options.serial && !one_device) {
            let write = |(d, batches): (DomainId, _)| {
                let _spending = self.shared.spend(&self.dom(d).budget);
                self.dom(d).write_batches(batches)
            };
            return parts.into_iter().map(write).collect();
        }
        if !one_device {
            let write = |(d, batches): (DomainId, _)| -> Box<dyn FnOnce() -> Result<Fits> + Send> {
                let d = self.dom(d).clone();
                Box::new(move || {
                    d.run_near();
                    let _spending = d.shared.spend(&d.budget);
                    let written = d.write_batches(batches);
                    // the flush may be another thread's
                    d.store.end_syncs();
                    written
                })
            };
            return self.committers.side_by_side(parts.into_iter().map(write).collect());
        }
        let panics: SmallVec<[_; 2]> = parts.iter().map(|(d, _)| self.dom(*d).fail_on_panic("an fsync")).collect();
        let mut writes = Vec::new();
        let mut results: Vec<Result<Fits>> = Vec::new();
        for (d, batches) in &mut parts {
            results.push(self.dom(*d).begin_batches(batches).map(|(mut w, fits)| {
                self.dom(*d).charge_writes(&w);
                writes.append(&mut w);
                fits
            }));
        }
        let mut failed = self.dom(parts[0].0).submit_of_several(writes).err();
        panics.into_iter().for_each(FailOnPanic::disarm);
        let why = failed.as_ref().map(ToString::to_string);
        for ((domain, batches), result) in parts.into_iter().zip(&mut results) {
            if let (Some(why), Ok(_)) = (&why, &*result) {
                // what of it reached the device nobody knows: it is the error of each
                *result = Err(failed.take().unwrap_or(Error::DomainFailed { domain, why: why.clone() }));
            }
            let d = self.dom(domain);
            match result {
                Ok(fits) => d.end_batches(batches, fits),
                Err(e) => d.fail(e),
            }
        }
        results
    }

    /// Makes what these domains wrote durable: all their devices at once. Of each whether it is.
    fn flush_domains(&self, wrote: &[DomainId]) -> Vec<Result<()>> {
        let flush = |d: &Domain| planted::step(Bug::NoFlushAfterSync, || d.flush_devices_but(Bug::SyncOneDevice));
        if self.store.devices() == 1 {
            // one flush is enough where all of them lie on one device
            let one = wrote.first().map_or(Ok(()), |d| flush(self.dom(*d)));
            let why = one.as_ref().err().map(ToString::to_string);
            let others = wrote.iter().skip(1).map(|d| match &why {
                Some(why) => Err(Error::DomainFailed { domain: *d, why: why.clone() }),
                None => Ok(()),
            });
            return std::iter::once(one).chain(others).collect();
        }
        if wrote.len() == 1 || self.shared.options.serial {
            return wrote.iter().map(|d| flush(self.dom(*d))).collect();
        }
        let part = |d: &DomainId| -> Box<dyn FnOnce() -> Result<()> + Send> {
            let d = self.dom(*d).clone();
            Box::new(move || flush(&d))
        };
        let flushed = self.committers.side_by_side(wrote.iter().map(part).collect());
        // what this thread wrote others may have flushed
        self.store.end_syncs();
        flushed
    }

    /// Gives the error of domain `d` to these results: itself to the first, to the others that the domain failed.
    fn give_error(
        &self,
        e: Error,
        d: DomainId,
        which: impl Iterator<Item = usize>,
        results: &mut SmallVec<[Result<bool>; 1]>,
    ) {
        let mut first = Some(e);
        for i in which {
            if results[i].is_ok() {
                let e = first.take().or_else(|| self.dom(d).check_failed().err());
                results[i] = Err(e.unwrap_or(Error::DomainFailed { domain: d, why: "its device failed".into() }));
            }
        }
    }

    /// fsync of several files, with one flush. `None`: it must wait for something; nothing was done for it, call
    /// [`Self::fsync`]. A file that is asked for twice is written once.
    pub(crate) fn fsync_together(&self, files: &[(InodeNo, bool)]) -> Vec<Option<Result<()>>> {
        let mut out: Vec<Option<Result<()>>> = files.iter().map(|_| None).collect();
        let read_only = self.read_only();
        let mut cells: SmallVec<[(Arc<Cell>, bool, usize); 1]> = SmallVec::new();
        for (i, (ino, data_only)) in files.iter().enumerate() {
            match self.cell(*ino).and_then(|c| self.dom(c.domain).check_failed().map(|()| c)) {
                Ok(c) if read_only || !self.dom(c.domain).keeps_journal() => out[i] = Some(Ok(())),
                Ok(c) if c.kind == FileKind::Dir => {}
                Ok(c) => cells.push((c, *data_only, i)),
                Err(e) => out[i] = Some(Err(e)),
            }
        }
        cells.sort_by_key(|(c, ..)| c.ino);
        // who asks for the same file: all of it, where one of them wants that
        let mut same: SmallVec<[(usize, usize); 1]> = SmallVec::new();
        cells.dedup_by(|next, kept| {
            let dup = next.0.ino == kept.0.ino;
            if dup {
                kept.1 &= next.1;
                same.push((next.2, kept.2));
            }
            dup
        });
        let mut locked: SmallVec<[_; 1]> = SmallVec::new();
        let mut ready: SmallVec<[ToWrite<'_>; 1]> = SmallVec::new();
        let mut index: SmallVec<[usize; 1]> = SmallVec::new();
        for (c, data_only, i) in &cells {
            // several of these at once are only tried: nobody waits for a file with others held
            let Some(one) = c.sync.try_lock() else { continue };
            locked.push(one);
            match self.gather(c, *data_only, false) {
                Ok(Gathered::Clean) => out[*i] = Some(Ok(())),
                Ok(Gathered::Ready(w)) => {
                    ready.push(*w);
                    index.push(*i);
                }
                Ok(Gathered::Changed | Gathered::Commit | Gathered::Wait(_)) => {}
                Err(e) => out[*i] = Some(Err(e)),
            }
        }
        if !ready.is_empty() {
            for (i, r) in index.into_iter().zip(self.write_gathered(ready)) {
                out[i] = match r {
                    Ok(true) => Some(Ok(())),
                    Ok(false) => None,
                    Err(e) => Some(Err(e)),
                };
            }
        }
        drop(locked);
        for (dup, kept) in same {
            out[dup] = match &out[kept] {
                Some(Ok(())) => Some(Ok(())),
                // by itself: it will be told the same
                _ => None,
            };
        }
        out
    }
}

fn with_ancestors<'a>(
    c: &Arc<Cell>,
    mut own: Batch,
    reach: Reach,
    ancestors: Vec<Ancestor>,
    enters: &Enters<'a>,
) -> ToWrite<'a> {
    let mut batches: SmallVec<[(DomainId, Batch); 1]> = SmallVec::new();
    let mut linked = Vec::new();
    if !ancestors.is_empty() {
        let mut records: BTreeMap<DomainId, Vec<Record>> = BTreeMap::new();
        for a in ancestors {
            records.entry(a.dir.domain).or_default().push(a.record);
            linked.push((a.dir, a.version));
        }
        for e in enters {
            let Some(records) = records.remove(&e.domain.id) else { continue };
            if e.domain.id == c.domain {
                own.add_ancestors(records);
            } else {
                batches.push((e.domain.id, e.domain.ancestors_batch(e, records)));
            }
        }
    }
    batches.push((c.domain, own));
    let panics = enters.iter().map(|e| e.domain.fail_on_panic("an fsync")).collect();
    ToWrite { panics, cell: c.clone(), reach, batches, linked }
}
