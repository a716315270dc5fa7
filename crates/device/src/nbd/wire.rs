//! The NBD protocol as bytes: fixed newstyle negotiation and simple replies (the NBD project's doc/proto.md).
//!
//! No socket and no lock; whatever a server sends is an answer or an error, and nothing is allocated that a length from
//! the wire alone asks for.

use std::io::{self, Read, Write};

const INIT_MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;

/// Handshake flags, of server and client alike.
const FIXED_NEWSTYLE: u16 = 1;
const NO_ZEROES: u16 = 2;

const OPT_GO: u32 = 7;
const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const REP_ERROR: u32 = 1 << 31;
const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

/// Largest reply to an option that is read (a string may have 4096 bytes), and most of them.
const OPTION_REPLY_MAX: u32 = 8192;
const OPTION_REPLIES_MAX: u32 = 64;

/// Most bytes of a request where the server names no limit.
const PAYLOAD_DEFAULT: u32 = 32 << 20;

/// Transmission flags of an export, NBD_FLAG_... in the protocol.
const HAS_FLAGS: u16 = 1;
const READ_ONLY: u16 = 1 << 1;
const SEND_FLUSH: u16 = 1 << 2;
const SEND_FUA: u16 = 1 << 3;
const SEND_TRIM: u16 = 1 << 5;
const CAN_MULTI_CONN: u16 = 1 << 8;

/// `NBD_CMD_FLAG_FUA`: the answer comes when the data is durable.
const COMMAND_FUA: u16 = 1;

/// Bytes of a request without its data.
pub(crate) const REQUEST_BYTES: usize = 28;
/// Bytes of a reply without its data.
pub(crate) const REPLY_BYTES: usize = 16;

/// What a server said that is against the protocol, or why it refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WireError {
    /// Of the connection; `UnexpectedEof` where the server closed it.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Against the protocol.
    #[error("the server does not keep to the NBD protocol: {0}")]
    Protocol(String),
    /// A refusal: asking again does not help.
    #[error("{0}")]
    Refused(String),
    /// The server does not give the export; one that has just been started may, a moment later.
    #[error("{0}")]
    NotGiven(String),
}

impl WireError {
    /// Whether another try may succeed.
    pub(crate) fn may_pass(&self) -> bool {
        !matches!(self, Self::Refused(_))
    }
}

impl From<WireError> for io::Error {
    fn from(e: WireError) -> Self {
        match e {
            WireError::Io(e) => e,
            e => io::Error::other(e.to_string()),
        }
    }
}

fn protocol<T>(why: impl Into<String>) -> Result<T, WireError> {
    Err(WireError::Protocol(why.into()))
}

/// What a server says of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Export {
    pub(crate) bytes: u64,
    flags: u16,
    /// Least size and alignment of a request.
    pub(crate) block_min: u32,
    /// Most data of a request.
    pub(crate) payload_max: u32,
}

impl Export {
    pub(crate) fn read_only(&self) -> bool {
        self.flags & READ_ONLY != 0
    }
    pub(crate) fn can_flush(&self) -> bool {
        self.flags & SEND_FLUSH != 0
    }
    pub(crate) fn can_fua(&self) -> bool {
        self.flags & SEND_FUA != 0
    }
    pub(crate) fn can_trim(&self) -> bool {
        self.flags & SEND_TRIM != 0
    }
    /// Whether a flush on one connection is one of all.
    pub(crate) fn can_multi_conn(&self) -> bool {
        self.flags & CAN_MULTI_CONN != 0
    }
}

/// Agrees on `export` with a server that has just accepted the connection. Afterwards requests may be sent.
pub(crate) fn negotiate(stream: &mut (impl Read + Write), export: &str) -> Result<Export, WireError> {
    greet(stream)?;
    let mut data = Vec::with_capacity(export.len() + 10);
    data.extend((export.len() as u32).to_be_bytes());
    data.extend(export.as_bytes());
    data.extend(1u16.to_be_bytes());
    data.extend(INFO_BLOCK_SIZE.to_be_bytes());
    option(stream, OPT_GO, &data)?;
    let mut found = None;
    let mut sizes = (1, PAYLOAD_DEFAULT);
    for _ in 0..OPTION_REPLIES_MAX {
        let (kind, body) = option_reply(stream, OPT_GO)?;
        match kind {
            REP_ACK => return finish(found, sizes),
            REP_INFO => match body.first_chunk::<2>().map(|k| u16::from_be_bytes(*k)) {
                Some(INFO_EXPORT) => {
                    let Ok([_, _, b @ .., f0, f1]) = <[u8; 12]>::try_from(&body[..]) else {
                        return protocol(format!("information on the export of {} bytes", body.len()));
                    };
                    found = Some((u64::from_be_bytes(b), u16::from_be_bytes([f0, f1])));
                }
                Some(INFO_BLOCK_SIZE) => {
                    let Ok([_, _, a, b, c, d, _, _, _, _, e, f, g, h]) = <[u8; 14]>::try_from(&body[..]) else {
                        return protocol(format!("information on block sizes of {} bytes", body.len()));
                    };
                    sizes = (u32::from_be_bytes([a, b, c, d]), u32::from_be_bytes([e, f, g, h]));
                }
                Some(_) => {}
                None => return protocol("information without a kind"),
            },
            kind if kind & REP_ERROR != 0 => return refused(kind & !REP_ERROR, export, &body),
            kind => return protocol(format!("reply {kind} to NBD_OPT_GO")),
        }
    }
    protocol("no end of information on the export")
}

/// Takes the server's greeting and answers it.
fn greet(stream: &mut (impl Read + Write)) -> Result<(), WireError> {
    let mut head = [0; 18];
    stream.read_exact(&mut head)?;
    let [init @ .., _, _, _, _, _, _, _, _, f0, f1] = head;
    let magic = u64::from_be_bytes(init);
    if magic != INIT_MAGIC {
        return protocol(format!("it begins with {magic:#018x}: is it an NBD server?"));
    }
    if head[8..16] != OPTION_MAGIC.to_be_bytes() {
        return Err(WireError::Refused("the server knows the oldstyle protocol only: use a newer one".into()));
    }
    let flags = u16::from_be_bytes([f0, f1]);
    if flags & FIXED_NEWSTYLE == 0 {
        return Err(WireError::Refused("the server does not know the fixed newstyle: use a newer one".into()));
    }
    let answer = u32::from(flags & (FIXED_NEWSTYLE | NO_ZEROES));
    stream.write_all(&answer.to_be_bytes())?;
    Ok(())
}

fn option(stream: &mut impl Write, option: u32, data: &[u8]) -> io::Result<()> {
    let mut out = Vec::with_capacity(16 + data.len());
    out.extend(OPTION_MAGIC.to_be_bytes());
    out.extend(option.to_be_bytes());
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(data);
    stream.write_all(&out)
}

fn option_reply(stream: &mut impl Read, option: u32) -> Result<(u32, Vec<u8>), WireError> {
    let mut head = [0; 20];
    stream.read_exact(&mut head)?;
    let word = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    if head[..8] != OPTION_REPLY_MAGIC.to_be_bytes() || word(8) != option {
        return protocol("a reply that is none to the option that was asked for");
    }
    let bytes = word(16);
    if bytes > OPTION_REPLY_MAX {
        return protocol(format!("a reply to an option of {bytes} bytes"));
    }
    let mut body = vec![0; bytes as usize];
    stream.read_exact(&mut body)?;
    Ok((word(12), body))
}

fn finish(found: Option<(u64, u16)>, (block_min, payload_max): (u32, u32)) -> Result<Export, WireError> {
    let Some((bytes, flags)) = found else { return protocol("no size of the export") };
    if flags & HAS_FLAGS == 0 {
        return protocol(format!("transmission flags {flags:#x}"));
    }
    if bytes > i64::MAX as u64 {
        return protocol(format!("an export of {bytes} bytes"));
    }
    if !block_min.is_power_of_two() || block_min > 64 << 10 || payload_max < block_min {
        return protocol(format!("block sizes from {block_min} to {payload_max}"));
    }
    Ok(Export { bytes, flags, block_min, payload_max })
}

fn refused<T>(code: u32, export: &str, text: &[u8]) -> Result<T, WireError> {
    let what = match code {
        1 => "it does not know NBD_OPT_GO: use a newer server",
        2 => "its policy forbids it",
        5 => "it wants TLS, which is not supported",
        6 => "it has no such export",
        7 => return Err(WireError::Io(io::Error::other("the server is shutting down"))),
        8 => "it wants block sizes to be kept to that it does not name",
        _ => "it refuses",
    };
    // it goes to a terminal or a log
    let said: String = String::from_utf8_lossy(text).chars().filter(|c| !c.is_control()).take(200).collect();
    let said = if said.is_empty() { said } else { format!(" (it says: {said})") };
    let why = format!("the server does not give the export `{export}`: {what}{said}");
    Err(if matches!(code, 2 | 6) { WireError::NotGiven(why) } else { WireError::Refused(why) })
}

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Command {
    Read = 0,
    Write = 1,
    Disconnect = 2,
    Flush = 3,
    Trim = 4,
}

/// The head of a request.
pub(crate) fn request(command: Command, fua: bool, cookie: u64, offset: u64, bytes: u32) -> [u8; REQUEST_BYTES] {
    let mut out = [0; REQUEST_BYTES];
    out[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
    out[4..6].copy_from_slice(&if fua { COMMAND_FUA } else { 0 }.to_be_bytes());
    out[6..8].copy_from_slice(&(command as u16).to_be_bytes());
    out[8..16].copy_from_slice(&cookie.to_be_bytes());
    out[16..24].copy_from_slice(&offset.to_be_bytes());
    out[24..].copy_from_slice(&bytes.to_be_bytes());
    out
}

/// The head of a simple reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reply {
    /// Errno of the server; 0: success.
    pub(crate) error: u32,
    pub(crate) cookie: u64,
}

impl Reply {
    pub(crate) fn parse(head: &[u8; REPLY_BYTES]) -> Result<Self, WireError> {
        let [m0, m1, m2, m3, e0, e1, e2, e3, cookie @ ..] = *head;
        let magic = u32::from_be_bytes([m0, m1, m2, m3]);
        if magic != SIMPLE_REPLY_MAGIC {
            return protocol(format!("a reply that begins with {magic:#010x}"));
        }
        Ok(Self { error: u32::from_be_bytes([e0, e1, e2, e3]), cookie: u64::from_be_bytes(cookie) })
    }

    /// Whether the server is going away, so that another connection must be asked.
    pub(crate) fn is_shutdown(&self) -> bool {
        self.error == libc::ESHUTDOWN as u32
    }

    /// The request's end. Errors on the wire have Linux's numbers; others than the protocol's are EIO.
    pub(crate) fn result(&self) -> io::Result<()> {
        const KNOWN: [i32; 7] =
            [libc::EPERM, libc::EIO, libc::ENOMEM, libc::EINVAL, libc::ENOSPC, libc::EOVERFLOW, libc::EOPNOTSUPP];
        match i32::try_from(self.error) {
            Ok(0) => Ok(()),
            Ok(e) if KNOWN.contains(&e) => Err(io::Error::from_raw_os_error(e)),
            _ => Err(io::Error::from_raw_os_error(libc::EIO)),
        }
    }
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
