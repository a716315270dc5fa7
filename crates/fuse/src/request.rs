//! A request taken apart, and the buffer that its answer is built in.
//!
//! Knows the framing (header, arguments, names, extensions), not the operations. Whatever the kernel sends that does
//! not parse is `EINVAL`, never a panic. Independent of how bytes reach the kernel.

use crate::abi::{self, InHeader, OutHeader};
use crate::node::WireId;
use braidfs::Cred;
use rustix::io::Errno;
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
    /// The header.
    pub head: InHeader,
    /// What follows it, without extensions.
    pub args: &'a [u8],
    extensions: &'a [u8],
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
        Ok(Self { head, args, extensions })
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
        T::read_from_prefix(self.args).map_err(|_| Errno::INVAL)
    }

    /// The only name in the arguments.
    pub fn name(&self) -> Result<&'a [u8], Errno> {
        split_name(self.args).map(|(name, _)| name)
    }

    /// Two names at the start of the arguments.
    pub fn two_names(&self) -> Result<(&'a [u8], &'a [u8]), Errno> {
        two_names(self.args)
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
            groups: self.groups().unwrap_or_default().into(),
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
    /// Grows to the largest answer; what lies behind `len` is left over from earlier ones.
    bytes: Vec<u8>,
    len: usize,
}

const HEAD: usize = size_of::<OutHeader>();

impl Answer {
    /// An empty one with room for `capacity` bytes.
    pub fn new(capacity: usize) -> Self {
        Self { bytes: vec![0; HEAD + capacity], len: HEAD }
    }

    /// Throws the body away.
    pub fn clear(&mut self) {
        self.len = HEAD;
    }

    /// Bytes of the body.
    pub fn len(&self) -> usize {
        self.len - HEAD
    }

    /// Appends a structure.
    pub fn put<T: IntoBytes + Immutable>(&mut self, part: &T) {
        self.put_bytes(part.as_bytes());
    }

    /// Appends bytes.
    pub fn put_bytes(&mut self, part: &[u8]) {
        self.room(part.len()).copy_from_slice(part);
        self.len += part.len();
    }

    /// Pads the body to 8 bytes (the header has 16).
    pub fn pad(&mut self) {
        let pad = self.len.next_multiple_of(8) - self.len;
        self.put_bytes(&[0; 8][..pad]);
    }

    /// Has `fill` write a body of at most `len` bytes and tell how many it wrote. The slice it gets holds garbage.
    pub fn fill<E>(&mut self, len: usize, fill: impl FnOnce(&mut [u8]) -> Result<usize, E>) -> Result<(), E> {
        self.len += fill(self.room(len))?.min(len);
        Ok(())
    }

    /// The whole frame, header completed.
    pub fn frame(&mut self, unique: u64) -> &[u8] {
        let head = OutHeader { len: self.len as u32, error: 0, unique };
        self.bytes[..HEAD].copy_from_slice(head.as_bytes());
        &self.bytes[..self.len]
    }

    /// The body.
    pub fn body(&self) -> &[u8] {
        &self.bytes[HEAD..self.len]
    }

    fn room(&mut self, len: usize) -> &mut [u8] {
        let end = self.len + len;
        if end > self.bytes.len() {
            self.bytes.resize(end, 0);
        }
        &mut self.bytes[self.len..end]
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
        a.pad();
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
