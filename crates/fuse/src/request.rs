//! A request taken apart, and the buffer that its answer is built in.
//!
//! Knows the framing (header, arguments, names, extensions), not the operations. Whatever the kernel sends that does
//! not parse is `EINVAL`, never a panic. Independent of how bytes reach the kernel.

use crate::abi::{self, InHeader, OutHeader};
use crate::node::WireId;
use braidfs::Cred;
use memmap2::MmapMut;
use rustix::io::Errno;
use std::sync::Arc;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Result of handling one request.
pub(crate) type Handled = Result<Outcome, Errno>;

/// What to do once a handler has returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Send what is in the [`Answer`].
    Reply,
    /// The request has been handed on; its new owner replies.
    Deferred,
    /// The kernel expects no reply.
    Silent,
}

/// One request from the kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request<'a> {
    /// Header of the request: opcode, node, who asks.
    pub head: InHeader,
    /// From the device: all that follows it, without extensions. Through a ring: the structure of the operation alone.
    args: &'a [u8],
    /// Through a ring: what follows the structure (names, data), which lies elsewhere there.
    payload: Option<&'a [u8]>,
    extensions: &'a [u8],
}

/// A copy of a request, for who answers it later.
#[derive(Debug)]
pub(crate) struct OwnedRequest {
    head: InHeader,
    args: Vec<u8>,
    payload: Option<Vec<u8>>,
    extensions: Vec<u8>,
}

impl OwnedRequest {
    /// The request as a handler takes it.
    pub fn get(&self) -> Request<'_> {
        let Self { head, args, payload, extensions } = self;
        Request { head: *head, args, payload: payload.as_deref(), extensions }
    }
}

impl<'a> Request<'a> {
    /// Takes the frame apart.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Errno> {
        let (head, rest) = InHeader::read_from_prefix(bytes).map_err(|_| Errno::INVAL)?;
        let ext = usize::from(head.total_extlen) * 8;
        if head.len as usize != bytes.len() || ext > rest.len() {
            return Err(Errno::INVAL);
        }
        let (args, extensions) = rest.split_at(rest.len() - ext);
        Ok(Self { head, args, payload: None, extensions })
    }

    /// A request as a ring hands it over: header, structure of the operation (what is behind it is garbage), and the rest.
    pub fn of_parts(head: InHeader, args: &'a [u8], rest: &'a [u8]) -> Result<Self, Errno> {
        let payload = rest.len().checked_sub(usize::from(head.total_extlen) * 8).ok_or(Errno::INVAL)?;
        let (payload, extensions) = rest.split_at(payload);
        Ok(Self { head, args, payload: Some(payload), extensions })
    }

    /// A copy that needs no buffer of the transport.
    pub fn detach(self) -> OwnedRequest {
        OwnedRequest {
            head: self.head,
            args: self.args.to_vec(),
            payload: self.payload.map(<[u8]>::to_vec),
            extensions: self.extensions.to_vec(),
        }
    }

    /// The inode in the header.
    pub fn node(&self) -> WireId {
        WireId(self.head.nodeid)
    }

    /// The fixed structure at the start of the arguments.
    pub fn arg<T: FromBytes + Immutable>(&self) -> Result<T, Errno> {
        self.arg_and_rest().map(|(arg, _)| arg)
    }

    /// The fixed structure and what follows it.
    pub fn arg_and_rest<T: FromBytes + Immutable>(&self) -> Result<(T, &'a [u8]), Errno> {
        let (arg, rest) = T::read_from_prefix(self.args).map_err(|_| Errno::INVAL)?;
        Ok((arg, self.payload.unwrap_or(rest)))
    }

    /// The only name in the arguments.
    pub fn name(&self) -> Result<&'a [u8], Errno> {
        split_name(self.bare()).map(|(name, _)| name)
    }

    /// Whether the only name in the arguments is `.`.
    pub fn names_itself(&self) -> bool {
        self.bare().starts_with(b".\0")
    }

    /// Two names at the start of the arguments.
    pub fn two_names(&self) -> Result<(&'a [u8], &'a [u8]), Errno> {
        two_names(self.bare())
    }

    /// The arguments of an operation without a structure.
    fn bare(&self) -> &'a [u8] {
        self.payload.unwrap_or(self.args)
    }

    /// A structure and one name.
    pub fn arg_and_name<T: FromBytes + Immutable>(&self) -> Result<(T, &'a [u8]), Errno> {
        let (arg, rest) = self.arg_and_rest()?;
        Ok((arg, split_name(rest)?.0))
    }

    /// A structure and two names.
    pub fn arg_and_two_names<T: FromBytes + Immutable>(&self) -> Result<(T, &'a [u8], &'a [u8]), Errno> {
        let (arg, rest) = self.arg_and_rest()?;
        let (a, b) = two_names(rest)?;
        Ok((arg, a, b))
    }

    /// Who asks. The kernel tells of the supplementary groups only the one that matters (that of a setgid directory).
    pub fn cred(&self) -> Cred {
        Cred {
            uid: self.head.uid,
            gid: self.head.gid,
            groups: self.groups().filter(|g| !g.is_empty()).map_or_else(no_groups, Into::into),
            privileged: self.head.uid == 0,
        }
    }

    fn groups(&self) -> Option<Vec<u32>> {
        let mut rest = self.extensions;
        while let Ok((ext, body)) = abi::ExtHeader::read_from_prefix(rest) {
            let size = ext.size as usize;
            if size < size_of::<abi::ExtHeader>() || size > rest.len() {
                return None;
            }
            if ext.kind == abi::EXT_GROUPS {
                let (count, body) = u32::read_from_prefix(body).ok()?;
                let list = body.get(..(count as usize).checked_mul(4)?)?;
                return Some(list.as_chunks().0.iter().map(|b| u32::from_ne_bytes(*b)).collect());
            }
            rest = rest.get(size.next_multiple_of(8)..)?;
        }
        None
    }
}

thread_local! {
    /// Each thread's own, so that none moves a count of others.
    static NO_GROUPS: Arc<[u32]> = Arc::from([]);
}

/// An empty list, without memory of its own.
fn no_groups() -> Arc<[u32]> {
    NO_GROUPS.with(Arc::clone)
}

/// A NUL-terminated name and what follows.
fn split_name(bytes: &[u8]) -> Result<(&[u8], &[u8]), Errno> {
    let end = bytes.iter().position(|&b| b == 0).ok_or(Errno::INVAL)?;
    Ok((&bytes[..end], &bytes[end + 1..]))
}

fn two_names(bytes: &[u8]) -> Result<(&[u8], &[u8]), Errno> {
    let (a, rest) = split_name(bytes)?;
    Ok((a, split_name(rest)?.0))
}

/// The answer under construction. Starts with room for the header, so that one `write` sends it; reused by its
/// thread, so that reads neither allocate nor clear memory.
#[derive(Debug)]
pub(crate) struct Answer {
    store: Store,
    /// Of the store: where the header begins, and where the body ends so far.
    start: usize,
    end: usize,
}

/// What lies behind `end` is left over from earlier answers.
#[derive(Debug)]
enum Store {
    /// Grows to the largest answer.
    Heap(Vec<u8>),
    /// Memory that the kernel reads the body from (see [`crate::transport`]).
    Mapped(MmapMut),
}

const HEAD: usize = size_of::<OutHeader>();

impl Answer {
    /// An empty one with room for `capacity` bytes.
    pub fn new(capacity: usize) -> Self {
        Self { store: Store::Heap(vec![0; HEAD + capacity]), start: 0, end: HEAD }
    }

    /// As [`Self::new`], with a body that begins at a page of memory, so that a device can read to it.
    pub fn of_pages(capacity: usize) -> Self {
        const PAGE: usize = 4096;
        MmapMut::map_anon(PAGE + capacity).map_or_else(|_| Self::new(capacity), |memory| Self::mapped(memory, PAGE))
    }

    /// One whose body is built at `at` of this memory, and must fit there.
    pub fn mapped(memory: MmapMut, at: usize) -> Self {
        Self { store: Store::Mapped(memory), start: at - HEAD, end: at }
    }

    /// All of its memory.
    pub fn memory(&mut self) -> &mut [u8] {
        match &mut self.store {
            Store::Heap(bytes) => bytes,
            Store::Mapped(bytes) => bytes,
        }
    }

    /// The memory that it was given.
    pub fn mapping(&self) -> Option<&MmapMut> {
        match &self.store {
            Store::Heap(_) => None,
            Store::Mapped(memory) => Some(memory),
        }
    }

    /// Throws the body away.
    pub fn clear(&mut self) {
        self.end = self.start + HEAD;
    }

    /// Bytes of the body.
    pub fn len(&self) -> usize {
        self.end - self.start - HEAD
    }

    /// Appends a structure.
    pub fn put<T: IntoBytes + Immutable>(&mut self, part: &T) {
        self.put_bytes(part.as_bytes());
    }

    /// Appends `part` as it is.
    pub fn put_bytes(&mut self, part: &[u8]) {
        self.extend(part.len()).copy_from_slice(part);
    }

    /// Makes the body so much longer; what is new holds garbage, all of which the caller replaces.
    pub fn extend(&mut self, len: usize) -> &mut [u8] {
        self.end += len;
        let (begin, end) = (self.end - len, self.end);
        if let Store::Heap(bytes) = &mut self.store
            && end > bytes.len()
        {
            bytes.resize(end, 0);
        }
        &mut self.memory()[begin..end]
    }

    /// Has `fill` write a body of at most `len` bytes and tell how many it wrote. The slice it gets holds garbage.
    pub fn fill<E>(&mut self, len: usize, fill: impl FnOnce(&mut [u8]) -> Result<usize, E>) -> Result<(), E> {
        self.end += fill(self.room(len))?.min(len);
        Ok(())
    }

    /// The whole frame, header completed.
    pub fn frame(&mut self, unique: u64) -> &[u8] {
        let (start, end) = (self.start, self.end);
        let head = OutHeader { len: (end - start) as u32, error: 0, unique };
        let bytes = self.memory();
        bytes[start..start + HEAD].copy_from_slice(head.as_bytes());
        &bytes[start..end]
    }

    /// What was put after the header.
    pub fn body(&self) -> &[u8] {
        let bytes: &[u8] = match &self.store {
            Store::Heap(bytes) => bytes,
            Store::Mapped(bytes) => bytes,
        };
        &bytes[self.start + HEAD..self.end]
    }

    /// [`Self::body`], to be changed.
    pub fn body_mut(&mut self) -> &mut [u8] {
        let (start, end) = (self.start, self.end);
        &mut self.memory()[start + HEAD..end]
    }

    fn room(&mut self, len: usize) -> &mut [u8] {
        let begin = self.end;
        self.extend(len);
        self.end = begin;
        &mut self.memory()[begin..begin + len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(opcode: u32, args: &[u8], ext: &[u8]) -> Vec<u8> {
        let head = InHeader {
            len: (40 + args.len() + ext.len()) as u32,
            opcode,
            unique: 7,
            nodeid: 1,
            uid: 1000,
            gid: 100,
            pid: 1,
            total_extlen: (ext.len() / 8) as u16,
            padding: 0,
        };
        [head.as_bytes(), args, ext].concat()
    }

    #[test]
    fn names_and_structures_parse() {
        let f = frame(
            abi::op::RENAME2,
            &[abi::Rename2In { newdir: 9, flags: 1, padding: 0 }.as_bytes(), b"a\0bc\0"].concat(),
            &[],
        );
        let r = Request::parse(&f).unwrap();
        let (arg, a, b) = r.arg_and_two_names::<abi::Rename2In>().unwrap();
        assert_eq!((arg.newdir, arg.flags, a, b), (9, 1, &b"a"[..], &b"bc"[..]));
    }

    #[test]
    fn damaged_frames_are_refused() {
        let f = frame(abi::op::LOOKUP, b"name-without-end", &[]);
        assert_eq!(Request::parse(&f).unwrap().name(), Err(Errno::INVAL));
        assert!(Request::parse(&f[..f.len() - 1]).is_err());
        assert!(Request::parse(&f[..39]).is_err());
        let f = frame(abi::op::MKDIR, b"abc", &[]);
        assert!(Request::parse(&f).unwrap().arg::<abi::MkdirIn>().is_err());
        let mut f = frame(abi::op::MKDIR, b"abc", &[]);
        f[36] = 200; // total_extlen
        assert!(Request::parse(&f).is_err());
    }

    #[test]
    fn both_transports_hand_over_the_same() {
        let ext = [16u32, abi::EXT_GROUPS, 1, 4711].map(u32::to_ne_bytes).concat();
        let arg = abi::Rename2In { newdir: 9, flags: 1, padding: 0 };
        let f = frame(abi::op::RENAME2, &[arg.as_bytes(), b"a\0bc\0"].concat(), &ext);
        let whole = Request::parse(&f).unwrap();
        // 128 bytes for the structure, of which it uses the first; the rest apart, with the extensions
        let mut args = [0xee; 128];
        args[..16].copy_from_slice(arg.as_bytes());
        let rest = [&b"a\0bc\0"[..], &ext].concat();
        let parts = Request::of_parts(whole.head, &args, &rest).unwrap();
        for r in [whole, parts, parts.detach().get(), whole.detach().get()] {
            let (arg, a, b) = r.arg_and_two_names::<abi::Rename2In>().unwrap();
            assert_eq!((arg.newdir, arg.flags, a, b), (9, 1, &b"a"[..], &b"bc"[..]));
            assert!(r.cred().in_group(4711));
        }
        let f = frame(abi::op::UNLINK, b"x\0", &[]);
        let head = Request::parse(&f).unwrap().head;
        assert_eq!(Request::of_parts(head, &[0xee; 128], b"x\0").unwrap().name(), Ok(&b"x"[..]));
        let mut short = head;
        short.total_extlen = 1;
        assert!(Request::of_parts(short, &[], b"x\0").is_err());
    }

    #[test]
    fn an_answer_is_built_in_memory_that_is_given() {
        let mut a = Answer::mapped(MmapMut::map_anon(8192).unwrap(), 4096);
        a.fill::<Errno>(4096, |b| {
            b.fill(7);
            Ok(4096)
        })
        .unwrap();
        assert_eq!((a.len(), a.memory()[4096], a.memory()[8191], a.memory()[4095]), (4096, 7, 7, 0));
        a.clear();
        assert!(a.body().is_empty());
    }

    #[test]
    fn supplementary_groups_are_found() {
        let ext = [16u32, abi::EXT_GROUPS, 1, 4711].map(u32::to_ne_bytes).concat();
        let f = frame(abi::op::MKDIR, b"x\0", &ext);
        let r = Request::parse(&f).unwrap();
        assert_eq!(r.name().unwrap(), b"x");
        assert!(r.cred().in_group(4711) && r.cred().in_group(100) && !r.cred().privileged);
        let lying = [16u32, abi::EXT_GROUPS, 1000, 4711].map(u32::to_ne_bytes).concat();
        let f = frame(abi::op::MKDIR, b"x\0", &lying);
        assert!(Request::parse(&f).unwrap().cred().groups.is_empty());
    }

    #[test]
    fn answer_is_framed_and_reused() {
        let mut a = Answer::new(64);
        a.put_bytes(b"abc");
        a.extend(5).fill(0);
        assert_eq!(a.body(), b"abc\0\0\0\0\0");
        a.clear();
        a.fill::<Errno>(10, |b| {
            b[..2].copy_from_slice(b"hi");
            Ok(2)
        })
        .unwrap();
        let f = a.frame(5);
        assert_eq!((f.len(), &f[16..]), (18, &b"hi"[..]));
        assert!(a.fill(4, |_| Err(Errno::IO)).is_err());
        assert_eq!(a.len(), 2);
    }
}
