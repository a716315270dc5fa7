//! `nbd://` and `nbd+unix://` URIs, as the NBD project's doc/uri.md has them, with parameters of our own.

use super::socket::connect_abstract;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Port of NBD, from IANA.
const PORT: u16 = 10809;
/// How long an answer, or a server that went away, is waited for.
const TIMEOUT: Duration = Duration::from_secs(30);
/// How long a lease lasts that is not renewed.
const LEASE: Duration = Duration::from_secs(15);
/// How long to wait for who has an export open to be there.
const PRESENCE_PATIENCE: Duration = Duration::from_secs(1);
/// Connections, where the server allows several.
const CONNECTIONS: usize = 4;
/// Most of them.
const CONNECTIONS_MAX: usize = 16;
/// Longest name of an export (the protocol's limit of a string).
const EXPORT_MAX: usize = 4096;

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Place {
    /// Host, without the brackets of an IPv6 address, and port.
    Tcp(String, u16),
    /// Path of a socket.
    Unix(PathBuf),
}

/// An export of an NBD server, and how to use it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdUri {
    /// As it was given.
    pub(crate) text: String,
    pub(crate) place: Place,
    /// Name of the export; empty: the server's default.
    pub(crate) export: String,
    /// How long an answer is waited for, with connecting anew.
    pub(crate) timeout: Duration,
    /// Most connections at once.
    pub(crate) connections: usize,
    /// How long the owner record of a writer lasts; `None`: no fencing.
    pub(crate) lease: Option<Duration>,
}

/// A process that has an export open for a mount: [`NbdUri::open_here`].
#[derive(Debug)]
pub struct OpenHere(UnixStream);

impl OpenHere {
    /// Whether it has it still; it is through with it when it has not.
    pub fn lasts(&self) -> bool {
        // it never says anything
        matches!((&self.0).read(&mut [0]), Err(e) if e.kind() == io::ErrorKind::WouldBlock)
    }
}

/// Whether a DEVICE argument is meant as a URI of a network block device. No such path can exist: its scheme would be a
/// directory, and be found by `./nbd:/…`.
pub fn is_nbd_uri(device: &Path) -> bool {
    let scheme = device.to_str().and_then(|d| d.split_once("://")).map(|(scheme, _)| scheme);
    scheme.is_some_and(|s| matches!(s, "nbd" | "nbds" | "nbd+unix" | "nbds+unix" | "nbd+vsock" | "nbds+vsock"))
}

impl NbdUri {
    /// Of a DEVICE argument.
    ///
    /// # Errors
    /// What is wrong with it, and what to write instead.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (scheme, rest) = text.split_once("://").ok_or("no URI: write nbd://HOST/EXPORT")?;
        if scheme.starts_with("nbds") {
            return Err("TLS is not supported: use nbd://, through a tunnel (ssh -L, stunnel, WireGuard)".into());
        }
        if rest.contains('#') {
            return Err("`#` has no meaning here: write %23 where a name has it".into());
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
        let mut uri = Self {
            text: text.to_string(),
            place: Place::Unix(PathBuf::new()),
            export: decode(export)?,
            timeout: TIMEOUT,
            connections: CONNECTIONS,
            lease: Some(LEASE),
        };
        if uri.export.len() > EXPORT_MAX {
            return Err(format!("the name of the export has {} bytes: {EXPORT_MAX} are allowed", uri.export.len()));
        }
        let mut socket = None;
        for part in query.split('&').filter(|p| !p.is_empty()) {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            match name {
                "socket" => socket = Some(PathBuf::from(decode(value)?)),
                "timeout" => uri.timeout = seconds(name, value, 1..=3600)?,
                "connections" => {
                    uri.connections = value
                        .parse()
                        .ok()
                        .filter(|n| (1..=CONNECTIONS_MAX).contains(n))
                        .ok_or_else(|| format!("connections={value}: use 1 to {CONNECTIONS_MAX}"))?;
                }
                "lease" if value == "off" => uri.lease = None,
                "lease" => uri.lease = Some(seconds(name, value, 2..=3600)?),
                _ if name.starts_with("tls-") => return Err(format!("{name}: TLS is not supported")),
                _ => return Err(format!("unknown parameter {name}: there are socket, timeout, connections, lease")),
            }
        }
        uri.place = match (scheme, socket) {
            ("nbd", None) => {
                let (host, port) = host_and_port(authority)?;
                Place::Tcp(host, port)
            }
            ("nbd", Some(_)) => return Err("socket= goes with nbd+unix:///EXPORT?socket=PATH".into()),
            ("nbd+unix", Some(_)) if !authority.is_empty() => {
                return Err(format!("nbd+unix has no host ({authority}): write nbd+unix:///EXPORT?socket=PATH"));
            }
            ("nbd+unix", Some(path)) if path.is_absolute() => Place::Unix(path),
            ("nbd+unix", Some(path)) => {
                return Err(format!("socket={}: the path must begin with /", path.display()));
            }
            ("nbd+unix", None) => return Err("no socket: write nbd+unix:///EXPORT?socket=PATH".into()),
            _ => return Err(format!("{scheme}:// is not supported: use nbd:// or nbd+unix://")),
        };
        Ok(uri)
    }

    /// The name under which the process that serves `mount` listens as long as it has the export open for that.
    pub(crate) fn presence(&self, mount: &str) -> io::Result<SocketAddr> {
        SocketAddr::from_abstract_name(self.presence_name(mount))
    }

    fn presence_name(&self, mount: &str) -> String {
        let mut hash = DefaultHasher::new();
        (&self.place, &self.export).hash(&mut hash);
        format!("braidfs-nbd-{:016x}-{mount}", hash.finish())
    }

    /// The process on this machine (of this network namespace) that has the export open for `mount`
    /// ([`NbdDevice::serves`](super::NbdDevice::serves)). Anybody can take the name that it listens by, so it is believed only
    /// of the superuser, of this user, and of `mounter`, for whom the export was mounted. A hint for who waits: locks and
    /// leases exclude, this does not.
    pub fn open_here(&self, mount: &str, mounter: Option<u32>) -> Option<OpenHere> {
        let (stream, user) = connect_abstract(&self.presence_name(mount), PRESENCE_PATIENCE).ok()?;
        let is_believed = user == 0 || user == rustix::process::geteuid().as_raw() || Some(user) == mounter;
        stream.set_nonblocking(true).ok()?;
        is_believed.then_some(OpenHere(stream))
    }

    /// The mounts for which processes of this machine (of this network namespace) say that they have the export open.
    pub fn mounts_here(&self) -> Vec<String> {
        let start = format!("@{}", self.presence_name(""));
        let table = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
        let names = table.lines().filter_map(|line| line.split_whitespace().last()?.strip_prefix(&start));
        let mut mounts: Vec<String> = names.map(Into::into).collect();
        // a connection to it has the name, too
        mounts.sort();
        mounts.dedup();
        mounts
    }

    /// What tells exports apart: place and name.
    pub(crate) fn names_same(&self, other: &Self) -> bool {
        self.place == other.place && self.export == other.export
    }
}

fn seconds(name: &str, value: &str, range: std::ops::RangeInclusive<u64>) -> Result<Duration, String> {
    let n: Option<u64> = value.parse().ok().filter(|n| range.contains(n));
    n.map(Duration::from_secs)
        .ok_or_else(|| format!("{name}={value}: use {} to {} seconds", range.start(), range.end()))
}

fn host_and_port(authority: &str) -> Result<(String, u16), String> {
    if authority.contains('@') {
        return Err("NBD knows no users: leave out what stands before @".into());
    }
    let (host, port) = match authority.strip_prefix('[') {
        Some(v6) => {
            let (host, rest) = v6.split_once(']').ok_or("an IPv6 address has no closing bracket")?;
            (host, rest.strip_prefix(':'))
        }
        None => authority.rsplit_once(':').map_or((authority, None), |(h, p)| (h, Some(p))),
    };
    if host.is_empty() {
        return Err("no host: write nbd://HOST[:PORT][/EXPORT]".into());
    }
    if host.contains(':') && !authority.starts_with('[') {
        return Err(format!("{host}: write an IPv6 address in brackets, [{host}]"));
    }
    let port = match port {
        None | Some("") => PORT,
        Some(p) => p.parse().ok().filter(|p| *p != 0).ok_or_else(|| format!("port {p}: use 1 to 65535"))?,
    };
    Ok((decode(host)?, port))
}

/// Undoes percent-encoding; an error says what is wrong.
fn decode(text: &str) -> Result<String, String> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(b) = bytes.next() {
        if b != b'%' {
            out.push(b);
            continue;
        }
        let mut digit = || bytes.next().and_then(|d| char::from(d).to_digit(16));
        match (digit(), digit()) {
            (Some(high), Some(low)) => out.push((high * 16 + low) as u8),
            _ => return Err(format!("{text}: % needs two hexadecimal digits behind it (%25 for the sign itself)")),
        }
    }
    if out.contains(&0) {
        return Err(format!("{text}: a NUL byte"));
    }
    String::from_utf8(out).map_err(|_| format!("{text}: not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tcp(text: &str) -> (String, u16, String) {
        match NbdUri::parse(text).unwrap() {
            NbdUri { place: Place::Tcp(host, port), export, .. } => (host, port, export),
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn uris_are_understood() {
        assert_eq!(tcp("nbd://h"), ("h".into(), 10809, String::new()));
        assert_eq!(tcp("nbd://h:1/a/b"), ("h".into(), 1, "a/b".into()));
        assert_eq!(tcp("nbd://[::1]:7/%2Fx%2c"), ("::1".into(), 7, "/x,".into()));
        assert_eq!(tcp("nbd://[::1]"), ("::1".into(), 10809, String::new()));
        let uri = NbdUri::parse("nbd+unix:///e?socket=/run/s%20t&timeout=5&connections=2&lease=9").unwrap();
        assert_eq!(uri.place, Place::Unix("/run/s t".into()));
        assert_eq!((uri.export.as_str(), uri.timeout.as_secs(), uri.connections), ("e", 5, 2));
        assert_eq!(uri.lease, Some(Duration::from_secs(9)));
        assert_eq!(NbdUri::parse("nbd://h?lease=off").unwrap().lease, None);
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (text, why) in [
            ("nbds://h", "TLS"),
            ("nbd://", "no host"),
            ("nbd:///e", "no host"),
            ("nbd://h:0", "port"),
            ("nbd://h:99999", "port"),
            ("nbd://::1/e", "brackets"),
            ("nbd://[::1", "bracket"),
            ("nbd://u@h", "users"),
            ("nbd://h?socket=/s", "nbd+unix"),
            ("nbd+unix:///e", "no socket"),
            ("nbd+unix://h/e?socket=/s", "no host"),
            ("nbd+unix:///e?socket=s", "begin with /"),
            ("nbd+vsock://1/e", "not supported"),
            ("nbd://h/%zz", "hexadecimal"),
            ("nbd://h/%00", "NUL"),
            ("nbd://h/%ff", "UTF-8"),
            ("nbd://h?timeout=0", "timeout"),
            ("nbd://h?lease=1", "lease"),
            ("nbd://h?connections=99", "connections"),
            ("nbd://h?fast=1", "unknown parameter"),
            ("nbd://h/e#x", "%23"),
        ] {
            assert!(is_nbd_uri(Path::new(text)), "{text}");
            let e = NbdUri::parse(text).unwrap_err();
            assert!(e.contains(why), "{text}: {e}");
        }
        for path in ["nbd", "/nbd://x", "disk.img", "nbdx://h"] {
            assert!(!is_nbd_uri(Path::new(path)), "{path}");
        }
    }

    #[test]
    fn who_has_an_export_open_is_seen_until_he_has_not() {
        use std::os::unix::net::UnixListener;
        let uri = NbdUri::parse(&format!("nbd://h/{}", std::process::id())).unwrap();
        assert!(uri.open_here("0:7", None).is_none() && uri.mounts_here().is_empty());
        // it accepts nobody
        let device = UnixListener::bind_addr(&uri.presence("0:7").unwrap()).unwrap();
        let open = uri.open_here("0:7", None).unwrap();
        assert!(open.lasts() && uri.open_here("0:8", None).is_none());
        assert_eq!(uri.mounts_here(), ["0:7"]);
        drop(device);
        assert!(!open.lasts() && uri.open_here("0:7", None).is_none() && uri.mounts_here().is_empty());
    }

    proptest! {
        #[test]
        fn any_text_is_an_answer(text in "nbd(\\+unix)?://[ -~]{0,40}") {
            let _ = NbdUri::parse(&text);
        }
    }
}
