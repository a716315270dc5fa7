//! Every decoder of on-disk structures. The first byte says which; checksums and headers are made right, so that the
//! bytes behind them are reached.

use braidfs::format::block::{BlockKind, HEADER_BYTES, seal};
use braidfs::format::codec::Reader;
use braidfs::format::dentry::{decode_bucket, decode_entries, encode_entries};
use braidfs::format::domain::DomainHeader;
use braidfs::format::group::{GroupHeader, SegmentTable, decode_owners};
use braidfs::format::inode::{Inode, decode_extents, decode_links, decode_refs, decode_xattrs, encode_extents};
use braidfs::format::journal::{ChunkId, ChunkKind, Record, decode_chunk, encode_chunk};
use braidfs::format::node::{NodeBlock, NodeRecord, NodeTableBlock};
use braidfs::format::super_block::SuperBlock;
use braidfs::format::{BLOCK_BYTES, BlockAddr, DomainId, InodeNo, TxId, bat};

const VOLUME: u32 = 7;
const ADDR: u64 = 40;

/// A pair whose first copy is `body` behind a right header.
fn pair(kind: BlockKind, body: &[u8]) -> Vec<u8> {
    let mut b = vec![0u8; 2 * BLOCK_BYTES];
    let n = body.len().min(BLOCK_BYTES - HEADER_BYTES);
    b[HEADER_BYTES..HEADER_BYTES + n].copy_from_slice(&body[..n]);
    seal(&mut b[..BLOCK_BYTES], kind, 0, VOLUME, ADDR, 1);
    b
}

/// What is decoded is encoded to the same again.
fn same_again<T: PartialEq + std::fmt::Debug, E: std::fmt::Debug>(
    value: &T,
    encode: impl Fn(&T) -> Vec<u8>,
    decode: impl Fn(&[u8]) -> Result<T, E>,
) {
    let bytes = encode(value);
    match decode(&bytes) {
        Ok(again) => assert_eq!(*value, again, "decoded differently after encoding"),
        Err(e) => panic!("{value:?} was accepted, but not what it encodes to: {e:?}"),
    }
}

/// Decodes `data[1..]` as the structure that `data[0]` names.
pub fn run(data: &[u8]) {
    let Some((which, body)) = data.split_first() else { return };
    match which % 16 {
        0 => {
            // identity and geometry stand in the body, so the seal follows it
            let mut b = pair(BlockKind::Super, body)[..BLOCK_BYTES].to_vec();
            let uuid: [u8; 4] = b[48..52].try_into().unwrap_or_default();
            b[32..36].copy_from_slice(&1u32.to_le_bytes());
            seal(&mut b, BlockKind::Super, 0xffff, u32::from_le_bytes(uuid), 0, 1);
            if let Ok(sb) = SuperBlock::from_block(&b, 0) {
                let _ = (sb.geometry(), sb.label_str(), sb.device_table().len());
            }
        }
        1 => {
            let count = usize::from(body.first().copied().unwrap_or(1)) + 1;
            let _ = bat::decode(&pair(BlockKind::Bat, body), VOLUME, ADDR, count, 4);
        }
        2 => {
            let _ = DomainHeader::from_pair(&pair(BlockKind::Domain, body), VOLUME, ADDR, 0);
        }
        3 => {
            let _ = GroupHeader::from_pair(&pair(BlockKind::Group, body), VOLUME, BlockAddr(ADDR));
        }
        4 => {
            let _ = SegmentTable::decode(&pair(BlockKind::SegmentTable, body), 32, VOLUME, BlockAddr(ADDR));
        }
        5 => {
            let _ = decode_owners(&pair(BlockKind::Owners, body), VOLUME, BlockAddr(ADDR));
        }
        6 => {
            let _ = NodeTableBlock::decode(&pair(BlockKind::NodeTable, body), VOLUME, BlockAddr(ADDR));
        }
        7 => {
            let b = pair(BlockKind::Node, body);
            if let Ok(n) = NodeBlock::check(&b[..BLOCK_BYTES], VOLUME, BlockAddr(ADDR)) {
                for i in 0..=n {
                    if let Ok(r) = NodeBlock::record(&b[..BLOCK_BYTES], i) {
                        let _ = Inode::decode(&r.payload);
                    }
                }
            }
        }
        8 => {
            let b = pair(BlockKind::Dir, body);
            let _ = decode_bucket(&b[..BLOCK_BYTES], InodeNo(1), 0, VOLUME, BlockAddr(ADDR));
        }
        9 => {
            if let Ok(i) = Inode::decode(body) {
                same_again(&i, Inode::encode, Inode::decode);
            }
        }
        10 => {
            if let Ok(e) = decode_extents(body) {
                assert!(e.windows(2).all(|w| w[0].end() <= w[1].lblk), "extents that do not rise were accepted");
                same_again(&e, |e| encode_extents(e), decode_extents);
            }
        }
        11 => {
            if let Ok(refs) = decode_refs(body) {
                assert!(refs.windows(2).all(|w| w[0].first < w[1].first), "references that do not rise");
            }
        }
        12 => {
            if let Ok(links) = decode_links(body) {
                let bad = |n: &[u8]| n.is_empty() || n.len() > 255 || n.contains(&b'/') || n.contains(&0);
                assert!(!links.iter().any(|l| bad(&l.name)), "a name that is none was accepted");
            }
        }
        13 => {
            let _ = decode_xattrs(body);
        }
        14 => {
            if let Ok(e) = decode_entries(body) {
                let bad = |n: &[u8]| n.is_empty() || n.len() > 255 || n.contains(&b'/') || n.contains(&0);
                assert!(!e.iter().any(|e| bad(&e.name)), "a name that is none was accepted");
                assert!(!e.iter().any(|e| matches!(&*e.name, b"." | b"..")), "a name that is taken was accepted");
                same_again(&e, |e| encode_entries(e), decode_entries);
            }
        }
        _ => {
            let body = &body[..body.len().min(200 * BLOCK_BYTES)];
            let id = ChunkId {
                kind: ChunkKind::Stream,
                domain: DomainId(0),
                volume: VOLUME,
                pos: 3,
                tx: TxId(9),
                stream: 0,
            };
            let (chunk, _) = encode_chunk(id, body);
            let _ = decode_chunk(&chunk, VOLUME, DomainId(0), 3);
            let mut r = Reader::new(body, "record");
            while Record::decode(&mut r).is_ok() && r.left() > 0 {}
            let _ = NodeRecord::decode(&mut Reader::new(body, "node"));
        }
    }
}
