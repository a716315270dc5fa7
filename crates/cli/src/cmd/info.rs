//! `braidfs info`: what a volume is, without mounting it.

use crate::failure::{Failure, Outcome};
use crate::{mounted, open, text};
use braidfs::DomainInfo;
use braidfs::{StatFs, Timestamp, Volume};
use braidfs_format::inode::Placement;
use braidfs_format::super_block::{DRAINED, INCOMPAT_DATA_SUMS, SuperBlock};
use serde::Serialize;
use std::fmt::Write;
use std::path::PathBuf;

/// Show what a volume is: superblock, domains, space
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  braidfs info disk.img\n  braidfs info --json /dev/sdb /dev/sdc\n\n\
    Nothing is written; a journal that was not replayed is replayed in memory only. Of a volume in use (mounted) it \
    shows the state of the last checkpoint, and says so: what the journals have since is not in it.")]
pub struct Args {
    /// Print it as JSON
    #[arg(long)]
    json: bool,
    /// All devices of the volume
    #[arg(required = true, value_name = "DEVICE")]
    devices: Vec<PathBuf>,
}

/// What a superblock says; also what `mkfs` reports.
#[derive(Debug, Serialize)]
pub struct VolumeReport {
    /// UUID of the volume.
    pub uuid: String,
    pub label: String,
    /// Version of the disk format.
    pub format_version: u32,
    /// Seconds since 1970.
    pub created: i64,
    /// Bytes of its block groups.
    pub bytes: u64,
    /// Bytes of a block group.
    pub group_bytes: u64,
    pub groups: u32,
    pub domains: u16,
    /// mlogs per domain.
    pub mlogs: u16,
    /// Largest file kept in its inode.
    pub inline_max: u16,
    /// Whether file data is checksummed.
    pub data_checksums: bool,
    /// Where new objects go.
    pub placement: &'static str,
    pub devices: Vec<DeviceReport>,
}

/// What `info` says of one device.
#[derive(Debug, Serialize)]
pub struct DeviceReport {
    /// UUID of the device, not of the volume.
    pub uuid: String,
    /// Bytes that the volume uses.
    pub bytes: u64,
    /// Block groups on it.
    pub groups: u32,
    /// Nothing new comes to lie on it (`braidfs device drain`).
    pub drained: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    /// A process has it open: all is as of the last checkpoint.
    in_use: bool,
    /// Where it is mounted, as far as can be seen.
    mounted_on: Option<String>,
    #[serde(flatten)]
    volume: VolumeReport,
    space: StatFs,
    domain: Vec<DomainInfo>,
}

/// The report of a superblock.
pub fn volume_report(sb: &SuperBlock) -> VolumeReport {
    let group_blocks = u64::from(sb.group_blocks.get());
    let devices = sb.device_table();
    let blocks: u64 = devices
        .iter()
        .map(|d| u64::from(d.groups.get().saturating_sub(1)) * group_blocks + u64::from(d.last_group_blocks.get()))
        .sum();
    let uuid = |bytes| uuid::Uuid::from_bytes(bytes).to_string();
    VolumeReport {
        uuid: uuid(sb.uuid),
        label: sb.label_str(),
        format_version: sb.version.get(),
        created: sb.created.get(),
        bytes: blocks << 12,
        group_bytes: group_blocks << 12,
        groups: sb.groups.get(),
        domains: sb.domains.get(),
        mlogs: sb.mlogs.get(),
        inline_max: sb.inline_max.get(),
        data_checksums: sb.incompat.get() & INCOMPAT_DATA_SUMS != 0,
        placement: match Placement::from_u8(sb.placement) {
            Ok(Placement::Spread) => "spread",
            Ok(Placement::Inherit) => "inherit",
            Ok(Placement::Dirs | Placement::Unset) => "dirs",
            Err(_) => "unknown",
        },
        devices: devices
            .iter()
            .map(|d| DeviceReport {
                uuid: uuid(d.uuid),
                bytes: d.blocks.get() << 12,
                groups: d.groups.get(),
                drained: d.flags.get() & DRAINED != 0,
            })
            .collect(),
    }
}

impl VolumeReport {
    /// Lines for a person.
    pub fn text(&self) -> String {
        let label = match self.label.as_str() {
            "" => String::new(),
            label => format!(", label \"{}\"", text::name(label.as_bytes())),
        };
        let inline = match self.inline_max {
            0 => "off".into(),
            n => format!("files up to {n} bytes"),
        };
        let sums = if self.data_checksums { "on" } else { "off" };
        let plural = |n: usize| if n == 1 { "" } else { "s" };
        let devices = self.devices.iter().enumerate().filter(|_| self.devices.len() > 1).map(|(i, d)| {
            let drained = if d.drained { ", is drained" } else { "" };
            format!("device {i:<5}{}, {} in {} block groups{drained}\n", d.uuid, text::size(d.bytes), d.groups)
        });
        let devices: String = devices.collect();
        format!(
            "volume      {}{label}\n\
             format      {}, made {} UTC\n\
             size        {} in {} block groups of {}, {} device{}\n\
             {devices}\
             domains     {}, with {} mlog{} each\n\
             placement   {}\n\
             inline data {inline}\n\
             data sums   {sums}\n",
            self.uuid,
            self.format_version,
            text::time(Timestamp { sec: self.created, nsec: 0 }),
            text::size(self.bytes),
            self.groups,
            text::size(self.group_bytes),
            self.devices.len(),
            plural(self.devices.len()),
            self.domains,
            self.mlogs,
            plural(self.mlogs.into()),
            self.placement,
        )
    }
}

pub fn run(args: &Args) -> Outcome {
    let paths = open::expand(&args.devices);
    let opened = open::look_at(&paths)?;
    let volume = if opened.in_use {
        Volume::look_at(&opened.devices).map_err(|e| open::explain("cannot look at the volume", &paths, &e))?
    } else {
        open::mount(opened.devices, &paths, false)?
    };
    let mounted_on = if opened.in_use { mounted::at(&paths).map(|m| m.target.display().to_string()) } else { None };
    let report = report(&volume, opened.in_use, mounted_on);
    open::close(volume)?;
    if args.json {
        let json = serde_json::to_string_pretty(&report).map_err(|e| Failure::new(format!("info: {e}")))?;
        crate::say(format_args!("{json}"))?;
    } else {
        crate::say(format_args!("{}", lines(&report).trim_end()))?;
    }
    Ok(0)
}

fn report(volume: &Volume, in_use: bool, mounted_on: Option<String>) -> Report {
    Report {
        in_use,
        mounted_on,
        volume: volume_report(&volume.super_block()),
        space: volume.statfs(),
        domain: volume.domains(),
    }
}

/// Of a domain, with the tenant that has it, how that uses its journal, and where it is placed.
fn state(d: &DomainInfo) -> String {
    let mut state = d.failed.as_deref().map_or_else(|| "good".into(), |why| format!("read-only: {why}"));
    if let Some(name) = &d.tenant {
        state += &format!(", tenant {}", text::name(name.as_bytes()));
    }
    match d.journal_mode {
        Some("scratch") => state += ", no journal: empty after a crash",
        Some(mode) => state += &format!(", journal mode {mode}"),
        None => {}
    }
    if let Some(node) = d.numa_node {
        state += &format!(", NUMA node {node}");
    }
    state
}

fn lines(report: &Report) -> String {
    let s = &report.space;
    let mut out = String::new();
    if report.in_use {
        let where_ = report.mounted_on.as_ref().map(|p| format!(", mounted on {p}")).unwrap_or_default();
        out = format!("in use      yes{where_}: as of the last checkpoint\n");
    }
    out += &report.volume.text();
    let used = s.blocks.saturating_sub(s.free);
    let mut line = |text: String| {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{text}");
    };
    line(format!(
        "space       {} used, {} free of {}",
        text::size(used << 12),
        text::size(s.free << 12),
        text::size(s.blocks << 12)
    ));
    line(format!("inodes      {} used, room for {}", s.inodes.saturating_sub(s.inodes_free), s.inodes_free));
    line("\ndomain  groups        size        free     journal    inodes  state".into());
    for d in &report.domain {
        line(format!(
            "{:>6}  {:>6}  {:>10}  {:>10}  {:>10}  {:>8}  {}",
            d.domain,
            d.groups,
            text::size(d.blocks << 12),
            text::size(d.free << 12),
            text::size(d.journal_blocks << 12),
            d.inodes.saturating_sub(d.inodes_free),
            state(d)
        ));
    }
    out
}
