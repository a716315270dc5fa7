//! What the header of a domain without a journal keeps of its tenant's directory.

use super::*;
use braidfs::{MountOptions, Volume};
use braidfs_format::domain::JournalMode;

/// Domain 1 of the volume, with `/a` as the directory of a tenant without a journal that is at rest; then `change` comes.
fn tenant(change: impl FnOnce(&mut NodeRecord, &mut DomainHeader)) -> Arc<SparseDevice> {
    let dev = populated();
    let mut m = model(&dev);
    let n = find(&mut m, "a");
    assert_eq!(m.domain_of(n), Some(1));
    let ino = m.body(n).unwrap();
    let inode = Inode { content: Content::InlineDir(vec![]), ..Inode::decode(&ino.inode.encode()).unwrap() };
    let (node, generation, flags) = (n.node(), ino.generation, USED | DIR);
    let mut record =
        NodeRecord { node, generation, kind: NodeKind::Inode, flags, owner: n, version: 1, payload: vec![] };
    record.payload = inode.encode();
    let d = &mut m.domains[1];
    let mut h = d.header.unwrap();
    (h.tenant_root, h.tenant_generation) = (n.0.into(), generation.into());
    h.tenant_name[..1].copy_from_slice(b"t");
    (h.tenant_journal, h.scratch_at_rest) = (JournalMode::Scratch as u8, 1);
    change(&mut record, &mut h);
    assert!(h.keep_scratch_root(&record.encode()));
    (d.header, d.header_dirty) = (Some(h), true);
    repair::write(&mut m).unwrap();
    dev
}

#[test]
fn a_tenant_without_a_journal_is_what_its_header_keeps() {
    let sound = tenant(|_, _| ());
    assert_eq!(run(&sound, &FORCE).findings, vec![]);
    assert!(agree(&sound), "the first pass doubts what holds");
    let there = preen::stored(&sound);
    type Damage = fn(&mut NodeRecord, &mut DomainHeader);
    let cases: [(&str, Damage); 4] = [
        ("another name", |r, _| {
            let mut i = Inode::decode(&r.payload).unwrap();
            i.links[0].name = b"other".as_slice().into();
            r.payload = i.encode();
        }),
        ("no inode", |r, _| r.kind = NodeKind::Xattrs),
        ("no record", |r, _| r.payload.truncate(9)),
        ("both in use and unmounted", |_, h| h.scratch_at_rest = 0),
    ];
    for (what, damage) in cases {
        let dev = tenant(damage);
        assert!(!agree(&dev), "{what}: the first pass lets it pass");
        let seen = run(&dev, &FORCE);
        assert_eq!(
            seen.findings.iter().map(|f| f.code).collect::<Vec<_>>(),
            [codes::TENANT],
            "{what}: {:#?}",
            seen.findings
        );
        assert!(preen::preened(&dev).by_hand, "{what}");
        assert_eq!(run(&dev, &REPAIR).unfixed(), 0, "{what}");
        assert_eq!(run(&dev, &FORCE).findings, vec![], "{what}");
        assert!(preen::stored(&dev) == there, "{what}: something is missing");
        let devices = vec![Arc::clone(&dev) as Arc<dyn Device>];
        let v = Volume::mount(devices, MountOptions { background: false, ..Default::default() }).unwrap();
        assert_eq!(v.lookup(v.lookup(InodeNo::ROOT, b"a").unwrap().ino, b"big").unwrap().size, 8_192_000, "{what}");
        v.unmount().unwrap();
        assert_eq!(run(&dev, &FORCE).findings, vec![], "{what}, mounted");
    }
}
