//! What servers may say in a negotiation and in replies: good, odd and hostile.

use super::*;
use proptest::prelude::*;
use std::io::Cursor;

/// A server that says what it will say whatever it is asked.
struct Script {
    says: Cursor<Vec<u8>>,
    heard: Vec<u8>,
}

impl Read for Script {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.says.read(buf)
    }
}

impl Write for Script {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.heard.extend(buf);
        Ok(buf.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn greeting(flags: u16) -> Vec<u8> {
    [&b"NBDMAGICIHAVEOPT"[..], &flags.to_be_bytes()].concat()
}

fn reply(kind: u32, body: &[u8]) -> Vec<u8> {
    let mut out = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
    out.extend(OPT_GO.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend((body.len() as u32).to_be_bytes());
    out.extend(body);
    out
}

fn export(bytes: u64, flags: u16) -> Vec<u8> {
    reply(REP_INFO, &[&[0, 0][..], &bytes.to_be_bytes(), &flags.to_be_bytes()].concat())
}

fn sizes(min: u32, max: u32) -> Vec<u8> {
    reply(REP_INFO, &[&[0, 3][..], &min.to_be_bytes(), &4096u32.to_be_bytes(), &max.to_be_bytes()].concat())
}

fn ask(parts: &[Vec<u8>]) -> (Result<Export, WireError>, Vec<u8>) {
    let mut script = Script { says: Cursor::new(parts.concat()), heard: Vec::new() };
    let result = negotiate(&mut script, "e");
    (result, script.heard)
}

#[test]
fn an_export_is_agreed_on() {
    let (found, heard) = ask(&[greeting(3), export(1 << 30, 0x10d), sizes(512, 1 << 20), reply(REP_ACK, &[])]);
    let found = found.unwrap();
    assert_eq!((found.bytes, found.block_min, found.payload_max), (1 << 30, 512, 1 << 20));
    assert!(found.can_flush() && found.can_fua() && found.can_multi_conn() && !found.read_only() && !found.can_trim());
    // flags of the client, then NBD_OPT_GO with the name and one kind of information
    assert_eq!(heard[..4], [0, 0, 0, 3]);
    assert_eq!(heard[4..], *b"IHAVEOPT\0\0\0\x07\0\0\0\x09\0\0\0\x01e\0\x01\0\x03");
}

#[test]
fn what_a_server_must_not_say_is_an_error() {
    let ack = || reply(REP_ACK, &[]);
    for (parts, why) in [
        (vec![b"SSH-2.0-OpenSSH_9.2p1 x".to_vec()], "is it an NBD server"),
        (vec![b"NBDMAGIC\0\0\x42\x02\x81\x86\x12\x53\0\0".to_vec()], "oldstyle"),
        (vec![greeting(0)], "fixed newstyle"),
        (vec![greeting(1), ack()], "no size"),
        (vec![greeting(1), export(1, 0), ack()], "flags"),
        (vec![greeting(1), export(u64::MAX, 1), ack()], "export of"),
        (vec![greeting(1), export(4096, 1), sizes(0, 9), ack()], "block sizes"),
        (vec![greeting(1), export(4096, 1), sizes(3, 9), ack()], "block sizes"),
        (vec![greeting(1), export(4096, 1), sizes(1 << 20, 1 << 21), ack()], "block sizes"),
        (vec![greeting(1), export(4096, 1), sizes(512, 9), ack()], "block sizes"),
        (vec![greeting(1), reply(REP_INFO, &[0])], "without a kind"),
        (vec![greeting(1), reply(REP_INFO, &[0, 0, 1])], "of 3 bytes"),
        (vec![greeting(1), reply(REP_INFO, &[0, 3, 1])], "of 3 bytes"),
        (vec![greeting(1), reply(77, &[])], "reply 77"),
        (vec![greeting(1), reply(REP_ERROR | 6, b"no\x1b[2J such")], "no such export"),
        (vec![greeting(1), reply(REP_ERROR | 5, b"")], "TLS"),
        (vec![greeting(1), vec![0; 20]], "none to the option"),
        (vec![greeting(1), [&reply(REP_ACK, &[])[..16], &[0xff; 4]].concat()], "of 4294967295 bytes"),
        (vec![greeting(1), sizes(1, 1 << 20).repeat(100)], "no end"),
        (vec![greeting(1), export(4096, 1)[..25].to_vec()], "failed to fill"),
    ] {
        let (result, _) = ask(&parts);
        let text = result.expect_err(why).to_string();
        assert!(text.contains(why) && !text.contains('\x1b'), "{why}: {text}");
    }
}

#[test]
fn replies_are_told_apart() {
    let head = |magic: u32, error: u32| -> [u8; REPLY_BYTES] {
        [&magic.to_be_bytes()[..], &error.to_be_bytes(), &7u64.to_be_bytes()].concat().try_into().unwrap()
    };
    assert_eq!(Reply::parse(&head(SIMPLE_REPLY_MAGIC, 0)).unwrap(), Reply { error: 0, cookie: 7 });
    assert!(Reply::parse(&head(0x668e_33ef, 0)).is_err(), "a structured reply was not agreed on");
    for (wire, errno) in
        [(28, libc::ENOSPC), (1, libc::EPERM), (95, libc::EOPNOTSUPP), (30, libc::EIO), (!0, libc::EIO)]
    {
        let e = Reply { error: wire, cookie: 0 }.result().unwrap_err();
        assert_eq!(e.raw_os_error(), Some(errno));
    }
    assert!(Reply { error: 108, cookie: 0 }.is_shutdown());
}

proptest! {
    /// A good answer with some bytes changed, cut off or put in: an export or an error, and never much memory.
    #[test]
    fn a_hostile_negotiation_ends(
        changes in prop::collection::vec((0usize..120, any::<u8>()), 0..6),
        cut in 0usize..140,
        more in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        let mut says = [greeting(3), export(1 << 30, 0x10d), sizes(512, 1 << 20), reply(REP_ACK, &[])].concat();
        for (at, value) in changes {
            if let Some(b) = says.get_mut(at) {
                *b = value;
            }
        }
        says.truncate(cut);
        says.extend(more);
        if let (Ok(found), _) = ask(&[says]) {
            prop_assert!(found.block_min.is_power_of_two() && found.payload_max >= found.block_min);
            prop_assert!(i64::try_from(found.bytes).is_ok());
        }
    }
}
