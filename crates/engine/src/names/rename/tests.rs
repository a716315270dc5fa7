//! What a rename, or a link, asks once more when the directories are locked: a tenant may be about to lose its journal since.

use super::*;
use crate::{MkfsOptions, MountOptions, TenantBudget};
use braidfs_device::{Device, MemDevice};
use std::time::Duration;

fn node(kind: FileKind) -> NewNode<'static> {
    NewNode { kind, mode: 0o755, umask: 0, rdev: 0, target: b"" }
}

/// With the root directory of a tenant; `share_dirs` as of the mount.
fn volume(share_dirs: bool) -> (Volume, Arc<Cell>) {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 8));
    let o = MkfsOptions { domains: Some(1), group_bytes: Some(4 << 20), ..MkfsOptions::default() };
    crate::mkfs::format(std::slice::from_ref(&device), &o).unwrap();
    let options = MountOptions { background: false, share_dirs, ..MountOptions::default() };
    let v = Volume::mount(vec![device], options).unwrap();
    let t = v.tenant_create(InodeNo::ROOT, b"t", 0o755, "t", TenantBudget::default(), &Cred::root()).unwrap();
    let root = v.mounted().dir_cell(t.root).unwrap();
    (v, root)
}

fn file(v: &Volume, dir: InodeNo, name: &[u8]) -> Arc<Cell> {
    let ino = v.create(dir, name, &node(FileKind::File), &Cred::root()).unwrap().ino;
    v.mounted().cell(ino).unwrap()
}

/// A rename that was begun before the tenant's border is closed, and goes on behind that.
fn rename_across(v: &Volume, tenant: &Cell, from: &Side<'_>, to: &Side<'_>, mode: RenameMode) -> Result<()> {
    let i = v.mounted();
    let src = i.lookup_to_leave(&from.dir, from.name).unwrap();
    let dst = i.find_in(&to.dir, to.name).unwrap();
    let unwritten = [Unwritten::default(); 2];
    let mut r = Request {
        from,
        to,
        src,
        dst,
        mode,
        asker: Asker::ANY,
        leaves: None,
        unwritten,
        in_order: false,
        blocks: RENAME_BLOCKS,
    };
    i.check_rename(&r).unwrap();
    r.unwritten = i.commit_before(&r, false).unwrap();
    let domain = i.dom(tenant.domain);
    domain.close_border(true);
    let done = i.try_rename(&r).map(|done| assert!(done.is_ok()));
    domain.close_border(false);
    done
}

#[test]
fn no_name_crosses_a_border_that_was_closed_meanwhile() {
    let (v, tenant) = volume(false);
    let i = v.mounted();
    let root = i.dir_cell(InodeNo::ROOT).unwrap();
    let side = |dir: &Arc<Cell>, name| Side { dir: dir.clone(), name, hash: i.hash(name) };
    let (f, inner) = (file(&v, InodeNo::ROOT, b"f"), file(&v, tenant.ino, b"inner"));
    v.sync().unwrap();
    for (to, mode) in [(&b"g"[..], RenameMode::Replace), (b"inner", RenameMode::Exchange)] {
        let done = rename_across(&v, &tenant, &side(&root, b"f"), &side(&tenant, to), mode);
        assert!(matches!(done, Err(Error::CrossScratch)), "{mode:?}: {done:?}");
    }
    let done = rename_across(&v, &tenant, &side(&tenant, b"inner"), &side(&root, b"out"), RenameMode::Replace);
    assert!(matches!(done, Err(Error::CrossScratch)), "{done:?}");
    // its header says where it hangs
    let done = rename_across(&v, &tenant, &side(&root, b"t"), &side(&root, b"u"), RenameMode::Replace);
    assert!(matches!(done, Err(Error::Busy(_))), "{done:?}");
    for (c, dir) in [(&f, &tenant), (&inner, &root)] {
        let unwritten = i.commit_new_parents(dir, c, c.domain).unwrap();
        i.dom(tenant.domain).close_border(true);
        let linked = i.link_at(c, dir, (b"linked", Asker::ANY), unwritten, &mut ENTRY_BLOCKS.clone());
        i.dom(tenant.domain).close_border(false);
        assert!(matches!(linked, Err(Error::CrossScratch)), "{linked:?}");
    }
    for (dir, name, ino) in [(&root, &b"f"[..], f.ino), (&tenant, b"inner", inner.ino), (&root, b"t", tenant.ino)] {
        assert_eq!(v.lookup(dir.ino, name).unwrap().ino, ino);
    }
    // and it does cross one that is open
    let done = i.link_in(&f, &tenant, b"linked", Asker::ANY).map(|a| a.nlink);
    assert!(matches!(done, Ok(2)), "{done:?}");
    drop((f, inner, root, tenant));
    v.unmount().unwrap();
}

/// The same into a directory whose names several threads change: the rename waits for it with its first look behind it.
#[test]
fn no_name_crosses_such_a_border_beside_others() {
    let (v, tenant) = volume(true);
    let i = v.mounted();
    let root = i.dir_cell(InodeNo::ROOT).unwrap();
    v.sync().unwrap();
    (0..300).for_each(|n| drop(file(&v, tenant.ino, format!("a name that needs buckets {n}").as_bytes())));
    [b"e", b"f"].into_iter().for_each(|name| drop(file(&v, InodeNo::ROOT, name)));
    let done = i.rename_beside((&root, b"e"), (&tenant, b"e"), Asker::ANY);
    assert!(matches!(done, Ok(Some(()))), "this test sees nothing: {done:?}");
    let done = std::thread::scope(|s| {
        let held = tenant.state.write();
        let renames = s.spawn(|| i.rename_beside((&root, b"f"), (&tenant, b"g"), Asker::ANY));
        std::thread::sleep(Duration::from_millis(200));
        i.dom(tenant.domain).close_border(true);
        drop(held);
        renames.join().expect("it crosses the border")
    });
    i.dom(tenant.domain).close_border(false);
    assert!(matches!(done, Ok(None)), "{done:?}");
    assert!(v.lookup(InodeNo::ROOT, b"f").is_ok());
    drop((root, tenant));
    v.unmount().unwrap();
}
