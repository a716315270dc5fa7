//! Tables of what came between two samples.

use crate::text;
use braidfs_fuse::watch::sample::{
    Device, Domain, Latency, Operation, Process, Quota, Rate, Sample, Serving, Share, Tenant,
};
use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt::Write;
use std::os::unix::fs::MetadataExt;

/// What is shown on a screen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tab {
    Operations,
    Domains,
    Processes,
    Tenants,
}

impl Tab {
    /// The last one only where there are tenants.
    const ALL: [Self; 4] = [Self::Operations, Self::Domains, Self::Processes, Self::Tenants];

    pub fn next(self, tabs: &[Self]) -> Self {
        let at = tabs.iter().position(|t| *t == self).map_or(0, |at| at + 1);
        tabs[at % tabs.len()]
    }
}

/// In which order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sort {
    Rate,
    Latency,
    Time,
    Name,
}

/// The first column is a name, the others are numbers.
#[derive(Debug)]
pub struct Table {
    pub columns: &'static [&'static str],
    pub rows: Vec<Vec<String>>,
}

/// See the module.
#[derive(Debug)]
pub struct View {
    /// Lines above the tables.
    pub head: Vec<String>,
    pub operations: Table,
    pub domains: Table,
    pub processes: Table,
    pub tenants: Table,
}

/// How threads of a sample are named: where this process sees other numbers than the server, by their numbers there.
pub fn names_for(sample: &Sample) -> Names<'static> {
    if shares_numbers(sample.pid_namespace) { &name_of } else { &number_of }
}

pub type Names<'n> = &'n dyn Fn(u32) -> Option<(u32, String)>;

/// Whether `/proc` has the numbers of that pid namespace. A server that tells none is believed to share ours.
fn shares_numbers(namespace: u64) -> bool {
    let ours = std::fs::metadata("/proc/self/ns/pid").map_or(0, |m| m.ino());
    // `/proc` may be that of yet another namespace.
    let me = std::fs::read_link("/proc/self");
    let is_proc_ours = me.is_ok_and(|me| me.as_os_str() == std::process::id().to_string().as_str());
    is_proc_ours && (namespace == 0 || namespace == ours)
}

fn number_of(thread: u32) -> Option<(u32, String)> {
    Some((thread, "thread".into()))
}

/// A thread's process and its name; `None`: it has ended.
fn name_of(thread: u32) -> Option<(u32, String)> {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    let field = |name: &str| status.lines().find_map(|l| l.strip_prefix(name)).map(str::trim);
    let process = field("Tgid:")?.parse().ok()?;
    let name = std::fs::read_to_string(format!("/proc/{process}/comm")).ok();
    Some((process, name.as_deref().or(field("Name:"))?.trim_end().to_owned()))
}

impl View {
    /// `name_of` tells a thread's process and its name.
    pub fn new(before: &Sample, now: &Sample, sort: Sort, name_of: Names<'_>) -> Self {
        // another server, which counts from 0: by an upgrade, or mounted again
        let (none, is_new) = (Sample::default(), now.uptime_ns < before.uptime_ns);
        let before = if is_new { &none } else { before };
        let seconds = (now.uptime_ns.saturating_sub(before.uptime_ns) as f64 / 1e9).max(1e-3);
        let per_second = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
        let operations: Vec<Operation> = now.operations.iter().map(|o| since(o, before)).collect();
        let sum = |of: fn(&Operation) -> u64| operations.iter().map(|o| of(o) as f64).sum::<f64>() / seconds;
        let bytes = |name: &str| {
            let of = operations.iter().find(|o| o.name == name).map_or(0, |o| o.bytes);
            text::size((of as f64 / seconds) as u64)
        };
        let (cache, was) = (now.cache, before.cache);
        let (hits, misses) = (per_second(cache.hits, was.hits), per_second(cache.misses, was.misses));
        let part = if hits + misses > 0.0 { format!("{:.1} %", 100.0 * hits / (hits + misses)) } else { "-".into() };
        let mut head = vec![
            format!(
                "{} requests/s, {} answered by other threads, {} errors; {} read, {} written a second",
                rate(sum(|o| o.requests)),
                rate(sum(|o| o.deferred)),
                rate(sum(|o| o.errors)),
                bytes("READ"),
                bytes("WRITE"),
            ),
            format!(
                "cache {} of {}, {} dirty; reads from it {part}, {}/s from the device",
                text::size(cache.data.saturating_add(cache.index)),
                text::size(cache.budget),
                text::size(cache.dirty),
                rate(misses),
            ),
        ];
        if is_new {
            head.push(format!("the server was replaced: all numbers are those of the new one, in {seconds:.1} s"));
        }
        head.extend(devices(&now.devices));
        head.extend(nearest_to_limits(&now.quotas));
        if now.restricted {
            head.push("processes, tenants, limits: only root and the user of the server see them".into());
        }
        Self {
            head,
            operations: operation_table(operations, seconds, sort),
            domains: domain_table(before, now, seconds, sort),
            processes: process_table(before, now, seconds, sort, name_of),
            tenants: tenant_table(before, now, sort, seconds),
        }
    }

    /// The tables that there are.
    pub fn tabs(&self) -> &'static [Tab] {
        let all = &Tab::ALL;
        if self.tenants.rows.is_empty() { &all[..all.len() - 1] } else { all }
    }

    pub fn table(&self, tab: Tab) -> &Table {
        match tab {
            Tab::Operations => &self.operations,
            Tab::Domains => &self.domains,
            Tab::Processes => &self.processes,
            Tab::Tenants => &self.tenants,
        }
    }

    /// All tables, for who reads no screen.
    pub fn text(&self, title: &str) -> String {
        let mut out = format!("braidfs top: {title}\n{}\n", self.head.join("\n"));
        for tab in Tab::ALL {
            let table = self.table(tab);
            if !table.rows.is_empty() {
                out.push('\n');
                table.write(&mut out);
            }
        }
        out
    }
}

impl Table {
    /// How wide each column must be.
    pub fn widths(&self) -> Vec<usize> {
        let of = |c: usize, name: &&str| {
            let cells = self.rows.iter().filter_map(|r| r.get(c)).map(|t| t.chars().count());
            cells.chain([name.chars().count()]).max().unwrap_or(0)
        };
        self.columns.iter().enumerate().map(|(c, name)| of(c, name)).collect()
    }

    fn write(&self, out: &mut String) {
        let widths = self.widths();
        let mut line = |cells: &mut dyn Iterator<Item = &str>| {
            for (c, (cell, width)) in cells.zip(&widths).enumerate() {
                // Writing to a String cannot fail.
                let _ = if c == 0 { write!(out, "{cell:<width$}") } else { write!(out, "  {cell:>width$}") };
            }
            out.truncate(out.trim_end().len());
            out.push('\n');
        };
        line(&mut self.columns.iter().copied());
        for row in &self.rows {
            line(&mut row.iter().map(String::as_str));
        }
    }
}

/// A line for each device, where there are several or one had errors; of no more than there is room for.
fn devices(devices: &[Device]) -> Vec<String> {
    const MOST: usize = 4;
    if devices.len() < 2 && devices.iter().all(|d| d.errors == 0) {
        return Vec::new();
    }
    let line = |d: &Device| {
        // What somebody called them must not move the cursor.
        let name = text::name(d.name.as_bytes());
        let name = if name.is_empty() { name } else { format!(" {name}") };
        let mut line = format!("device {}{name}: {} of {} free", d.device, text::size(d.free), text::size(d.bytes));
        if d.state != "ok" {
            line += &format!(", {}", text::name(d.state.as_bytes()));
        }
        if d.errors > 0 {
            line += &format!(", {}", text::count(d.errors, "error", "errors"));
        }
        let mut tenants: Vec<_> = d.tenants.iter().collect();
        tenants.sort_by_key(|t| Reverse(t.bytes));
        let share = |t: &&Share| format!("{} {}", text::name(t.name.as_bytes()), text::size(t.bytes));
        let tenants: Vec<_> = tenants.iter().take(MOST).map(share).collect();
        if tenants.is_empty() { line } else { format!("{line}; {}", tenants.join(", ")) }
    };
    // those with errors are seen
    let mut shown: Vec<_> = devices.iter().collect();
    shown.sort_by_key(|d| d.errors == 0);
    shown.truncate(MOST);
    shown.sort_by_key(|d| d.device);
    shown.into_iter().map(line).collect()
}

/// Lines of the users, groups and directories that are nearest to their limits; of no more than there is room for.
fn nearest_to_limits(quotas: &[Quota]) -> impl Iterator<Item = String> {
    const MOST: usize = 3;
    let mut nearest: Vec<&Quota> = quotas.iter().filter(|q| q.nearest() > 0.0).collect();
    nearest.sort_by(|a, b| b.nearest().total_cmp(&a.nearest()));
    let line = |q: &&Quota| {
        let of =
            |used: String, most: Option<String>| most.map_or_else(|| used.clone(), |most| format!("{used} of {most}"));
        let ((kind, id), part) = (q.whose(), 100.0 * q.nearest());
        let space = of(text::size(q.used), q.space.or(q.soft_space).map(text::size));
        let inodes = of(q.inodes.to_string(), q.inodes_max.or(q.soft_inodes).map(|n| n.to_string()));
        let over = if q.grace_is_over { ", its grace is over" } else { "" };
        format!("limit of {kind} {id}: {part:.0} %, {space}, {inodes} inodes{over}")
    };
    nearest.iter().take(MOST).map(line).collect::<Vec<_>>().into_iter()
}

/// What came of an operation since the other sample.
fn since(now: &Operation, before: &Sample) -> Operation {
    let Some(was) = before.operations.iter().find(|o| o.opcode == now.opcode) else { return now.clone() };
    Operation {
        opcode: now.opcode,
        name: now.name.clone(),
        requests: now.requests.saturating_sub(was.requests),
        deferred: now.deferred.saturating_sub(was.deferred),
        errors: now.errors.saturating_sub(was.errors),
        bytes: now.bytes.saturating_sub(was.bytes),
        timed: now.timed.saturating_sub(was.timed),
        timed_ns: now.timed_ns.saturating_sub(was.timed_ns),
        latency: now.latency.since(&was.latency),
    }
}

fn operation_table(mut operations: Vec<Operation>, seconds: f64, sort: Sort) -> Table {
    operations.retain(|o| o.requests > 0);
    // Handlers that were timed stand for all.
    let time = |o: &Operation| o.timed_ns as f64 / o.timed.max(1) as f64 * o.requests as f64;
    operations.sort_by(|a, b| a.name.cmp(&b.name));
    match sort {
        Sort::Rate => operations.sort_by_key(|o| Reverse(o.requests)),
        Sort::Latency => operations.sort_by_key(|o| Reverse(o.latency.quantile(0.99))),
        Sort::Time => operations.sort_by_key(|o| Reverse(time(o) as u64)),
        Sort::Name => {}
    }
    let all: f64 = operations.iter().map(time).sum();
    let row = |o: &Operation| {
        let at = |q| percentile(&o.latency, q);
        let part = if all > 0.0 { format!("{:.0} %", 100.0 * time(o) / all) } else { "-".into() };
        let per_second = |n: u64| rate(n as f64 / seconds);
        // What a server calls it must not move the cursor.
        let name = text::name(o.name.as_bytes());
        vec![name, per_second(o.requests), per_second(o.errors), at(0.5), at(0.9), at(0.99), at(0.999), part]
    };
    Table {
        columns: &["operation", "per s", "errors", "p50", "p90", "p99", "p99.9", "of time"],
        rows: operations.iter().map(row).collect(),
    }
}

fn percentile(latency: &Latency, q: f64) -> String {
    latency.quantile(q).map_or_else(|| "-".into(), duration)
}

fn domain_of(sample: &Sample, domain: u16) -> Domain {
    sample.domains.iter().find(|d| d.domain == domain).cloned().unwrap_or_default()
}

/// Requests that a domain was asked, as many as those that were timed stand for, and percentiles of their times.
fn asked(before: &Domain, now: &Domain, sampled: u32, seconds: f64) -> [String; 3] {
    let latency = now.latency.since(&before.latency);
    let requests = latency.count().saturating_mul(u64::from(sampled.max(1)));
    [rate(requests as f64 / seconds), percentile(&latency, 0.5), percentile(&latency, 0.99)]
}

/// In the order of their numbers, or those whose answers take longest, each or all together, first.
fn domain_table(before: &Sample, now: &Sample, seconds: f64, sort: Sort) -> Table {
    let per_second = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
    let mut domains: Vec<(Domain, &Domain)> = now.domains.iter().map(|d| (domain_of(before, d.domain), d)).collect();
    let latency = |(was, d): &(Domain, &Domain)| d.latency.since(&was.latency);
    match sort {
        Sort::Latency => domains.sort_by_key(|d| Reverse(latency(d).quantile(0.99))),
        Sort::Time => domains.sort_by_key(|d| Reverse(latency(d).about_sum())),
        Sort::Rate | Sort::Name => {}
    }
    let rows = domains.iter().map(|(was, d)| {
        let [requests, p50, p99] = asked(was, d, now.sampled, seconds);
        let part = |n: u64, of: u64| if of > 0 { format!("{:.0} %", 100.0 * n as f64 / of as f64) } else { "-".into() };
        vec![
            d.domain.to_string(),
            requests,
            p50,
            p99,
            part(d.journal_used, d.journal_blocks),
            rate(per_second(d.commits, was.commits)),
            rate(per_second(d.joiners, was.joiners)),
            rate(per_second(d.fast_syncs, was.fast_syncs)),
            rate(per_second(d.checkpoints, was.checkpoints)),
            rate(per_second(d.cleaned_blocks, was.cleaned_blocks)),
            text::size(d.free_blocks << 12),
            part(d.free_blocks, d.blocks),
            state(d),
        ]
    });
    Table {
        columns: &[
            "domain",
            "per s",
            "p50",
            "p99",
            "journal",
            "commits/s",
            "joiners/s",
            "fsyncs/s",
            "checkp./s",
            "cleaned/s",
            "free",
            "of it",
            "state",
        ],
        rows: rows.collect(),
    }
}

/// Those that are nearest to a limit first, or those whose answers take longest.
fn tenant_table(before: &Sample, now: &Sample, sort: Sort, seconds: f64) -> Table {
    let per_second = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
    let part = |n: u64, of: Option<u64>| of.map_or(0.0, |of| n as f64 / of.max(1) as f64);
    let nearest = |t: &Tenant| part(t.used, t.space).max(part(t.inodes, t.inodes_max));
    let mut tenants: Vec<&Tenant> = now.tenants.iter().collect();
    tenants.sort_by(|a, b| a.name.cmp(&b.name));
    if sort != Sort::Name {
        tenants.sort_by(|a, b| nearest(b).total_cmp(&nearest(a)));
    }
    if sort == Sort::Latency {
        let latency = |t: &Tenant| domain_of(now, t.domain).latency.since(&domain_of(before, t.domain).latency);
        tenants.sort_by_key(|t| Reverse(latency(t).quantile(0.99)));
    }
    let was_of = |t: &Tenant| before.tenants.iter().find(|was| was.name == t.name).cloned().unwrap_or_default();
    // of the limit that is nearer
    let speed = |is: &Rate, was: &Rate| {
        let (bytes, requests) = (per_second(is.bytes, was.bytes), per_second(is.requests, was.requests));
        let part = |n: f64, of: Option<u64>| of.map(|of| 100.0 * n / of.max(1) as f64);
        let most = [part(bytes, is.bytes_per_second), part(requests, is.requests_per_second)];
        match most.into_iter().flatten().reduce(f64::max) {
            Some(part) => format!("{} {part:.0} %", text::size(bytes as u64)),
            None => "-".into(),
        }
    };
    // calls that wait for a limit, on average
    let waiting = |is: &Tenant, was: &Tenant| {
        let all = |t: &Tenant| [t.read.waited_ns, t.written.waited_ns, t.serving.waited_ns];
        let sum = |t: &Tenant| all(t).into_iter().fold(0, u64::saturating_add);
        format!("{:.1}", per_second(sum(is), sum(was)) / 1e9)
    };
    // of a processor, and of the limit
    let served = |is: &Serving, was: &Serving| match is.ns_per_second {
        Some(limit) => {
            let used = per_second(is.ns, was.ns);
            format!("{:.0} % {:.0} %", used / 1e7, 100.0 * used / limit.max(1) as f64)
        }
        None => "-".into(),
    };
    let moving = |t: &Tenant| match t.elsewhere_groups {
        0 => String::new(),
        _ => format!(", {} elsewhere", text::size(t.elsewhere)),
    };
    let row = |t: &&Tenant| {
        let (is, was) = (domain_of(now, t.domain), domain_of(before, t.domain));
        let [requests, p50, p99] = asked(&was, &is, now.sampled, seconds);
        let of = |n: u64, of: Option<u64>| of.map_or_else(|| "-".into(), |_| format!("{:.0} %", 100.0 * part(n, of)));
        vec![
            // What somebody called it must not move the cursor.
            text::name(t.name.as_bytes()),
            t.domain.to_string(),
            requests,
            p50,
            p99,
            text::size(t.used),
            of(t.used, t.space),
            t.inodes.to_string(),
            of(t.inodes, t.inodes_max),
            speed(&t.read, &was_of(t).read),
            speed(&t.written, &was_of(t).written),
            served(&t.serving, &was_of(t).serving),
            waiting(t, &was_of(t)),
            rate(per_second(is.commits, was.commits)),
            state(&is) + &moving(t),
        ]
    };
    Table {
        columns: &[
            "tenant",
            "domain",
            "per s",
            "p50",
            "p99",
            "used",
            "of limit",
            "inodes",
            "of limit",
            "read/s",
            "written/s",
            "served",
            "waiting",
            "commits/s",
            "state",
        ],
        rows: tenants.iter().map(row).collect(),
    }
}

fn state(d: &Domain) -> String {
    if d.failed.is_some() { "FAILED".into() } else { "ok".into() }
}

/// Threads of one process are one row.
fn process_table(before: &Sample, now: &Sample, seconds: f64, sort: Sort, name_of: Names<'_>) -> Table {
    let was: HashMap<u32, &Process> = before.processes.iter().map(|p| (p.thread, p)).collect();
    let (none, mut by_process) = (Process::default(), HashMap::<(u32, String), (u64, u64, Latency)>::new());
    for p in &now.processes {
        let was = was.get(&p.thread).copied().unwrap_or(&none);
        let requests = p.requests.saturating_sub(was.requests);
        if requests > 0 {
            let key = match p.thread {
                0 => (0, "kernel".into()),
                thread => name_of(thread).unwrap_or((thread, "?".into())),
            };
            let sum = by_process.entry(key).or_default();
            let (timed, ns) = (p.timed.saturating_sub(was.timed), p.timed_ns.saturating_sub(was.timed_ns));
            // Those that were timed stand for all.
            let all_ns = if timed > 0 { ns as f64 / timed as f64 * requests as f64 } else { 0.0 };
            (sum.0, sum.1) = (sum.0.saturating_add(requests), sum.1.saturating_add(all_ns as u64));
            sum.2 = sum.2.with(&p.latency.since(&was.latency));
        }
    }
    let mut all: Vec<_> = by_process.into_iter().collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    match sort {
        Sort::Rate => all.sort_by_key(|(_, (requests, ..))| Reverse(*requests)),
        Sort::Time => all.sort_by_key(|(_, (_, ns, _))| Reverse(*ns)),
        Sort::Latency => all.sort_by_key(|(_, (.., latency))| Reverse(latency.quantile(0.99))),
        Sort::Name => all.sort_by(|a, b| a.0.1.cmp(&b.0.1)),
    }
    let row = |((process, name), (requests, ns, latency)): ((u32, String), (u64, u64, Latency))| {
        // What a program calls itself must not move the cursor.
        let name = text::name(name.as_bytes());
        let mean = duration(ns / requests.max(1));
        vec![
            name,
            process.to_string(),
            rate(requests as f64 / seconds),
            mean,
            percentile(&latency, 0.5),
            percentile(&latency, 0.9),
            percentile(&latency, 0.99),
            format!("{:.1} %", ns as f64 / seconds / 1e7),
        ]
    };
    Table {
        columns: &["process", "pid", "per s", "mean", "p50", "p90", "p99", "of a CPU"],
        rows: all.into_iter().map(row).collect(),
    }
}

fn rate(n: f64) -> String {
    match n {
        0.0 => "0".into(),
        n if n < 10.0 => format!("{n:.1}"),
        n => format!("{n:.0}"),
    }
}

fn duration(nanos: u64) -> String {
    match nanos as f64 {
        n if n < 9_950.0 => format!("{:.1} µs", n / 1e3),
        n if n < 999_500.0 => format!("{:.0} µs", n / 1e3),
        n if n < 9.95e6 => format!("{:.1} ms", n / 1e6),
        n if n < 999.5e6 => format!("{:.0} ms", n / 1e6),
        n => format!("{:.1} s", n / 1e9),
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use serde_json::json;

    /// Two samples, a second apart.
    pub fn samples() -> (Sample, Sample) {
        let before = json!({"layout": 1, "uptime_ns": 5_000_000_000u64,
            "operations": [{"opcode": 3, "name": "GETATTR", "requests": 100, "timed": 100, "timed_ns": 1000, "latency": [[9, 100]]}],
            "domains": [{"domain": 0, "commits": 4, "latency": [[9, 50]]}], "cache": {"hits": 5},
            "processes": [{"thread": 11, "requests": 7, "timed": 7, "timed_ns": 70}]});
        let now = json!({"layout": 1, "uptime_ns": 6_000_000_000u64, "sampled": 1,
            "operations": [
                {"opcode": 3, "name": "GETATTR", "requests": 1100, "errors": 2, "timed": 1100, "timed_ns": 3_001_000,
                 "latency": [[9, 1090], [80, 10]]},
                {"opcode": 15, "name": "READ", "requests": 3, "bytes": 12288, "timed": 3, "timed_ns": 9_000_000, "latency": [[140, 3]]},
            ],
            "domains": [{"domain": 0, "blocks": 100, "free_blocks": 25, "journal_blocks": 50, "journal_used": 10, "commits": 6,
                         "latency": [[9, 60]]},
                        {"domain": 1, "blocks": 100, "failed": "broken", "latency": [[80, 9], [140, 1]]}],
            "cache": {"budget": 1 << 30, "data": 1 << 20, "dirty": 4096, "hits": 14, "misses": 1},
            "processes": [{"thread": 11, "requests": 507, "timed": 507, "timed_ns": 1_500_070, "latency": [[9, 494], [81, 6]]}, {"thread": 12, "requests": 500, "timed": 50, "timed_ns": 500_000, "latency": [[9, 47], [141, 3]]},
                          {"thread": 0, "requests": 2, "timed_ns": 0}, {"thread": 99, "requests": 1, "timed_ns": 9}],
            "tenants": [{"name": "free", "domain": 0, "used": 4096, "inodes": 1},
                        {"name": "web\u{1b}[2J", "domain": 0, "used": 1 << 20, "space": 4 << 20, "inodes": 10, "inodes_max": 1000},
                        {"name": "mail", "domain": 1, "used": 1 << 20, "space": 4 << 20, "inodes": 1200, "inodes_max": 1000,
                         "devices": [0], "elsewhere_groups": 2, "elsewhere": 1 << 20,
                         "serving": {"ns_per_second": 500_000_000, "ns": 450_000_000, "waits": 3, "waited_ns": 500_000_000},
                         "written": {"bytes_per_second": 4 << 20, "requests_per_second": 100, "bytes": 2 << 20, "requests": 80, "waited_ns": 1_500_000_000u64}}]});
        (serde_json::from_value(before).unwrap(), serde_json::from_value(now).unwrap())
    }

    /// Two threads of one process; others have ended.
    pub fn names(thread: u32) -> Option<(u32, String)> {
        matches!(thread, 11 | 12).then(|| (11, "git\u{1b}[2J".into()))
    }

    #[test]
    fn what_came_between_is_shown_as_text() {
        let (before, now) = samples();
        let text = View::new(&before, &now, Sort::Rate, &names).text("/mnt");
        for line in [
            "1003 requests/s, 0 answered by other threads, 2.0 errors; 12 KiB read, 0 B written a second",
            "operation  per s  errors     p50     p90     p99   p99.9  of time",
            "GETATTR     1000     2.0  1.3 µs  1.3 µs  1.3 µs  590 µs     25 %",
            "READ         3.0       0  109 ms  109 ms  109 ms  109 ms     75 %",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n---\n{text}");
        }
        assert!(text.contains("FAILED") && text.contains("20 %") && text.contains("25 %"), "{text}");
        assert!(text.contains("reads from it 90.0 %"), "{text}");
        let processes: Vec<_> = text.lines().skip_while(|l| !l.starts_with("process")).skip(1).collect();
        assert!(
            processes[0].contains("git")
                && processes[0].contains(" 11 ")
                && processes[0].contains("1000  6.5 µs  1.3 µs  1.3 µs  655 µs     0.7 %"),
            "{text}"
        );
        assert!(processes[1].starts_with("kernel") && processes[2].starts_with('?'), "{text}");
        assert!(!text.contains('\u{1b}'), "a name moves the cursor");
    }

    #[test]
    fn a_server_that_was_replaced_is_told() {
        let (before, now) = samples();
        let replaced = Sample { uptime_ns: 7_000_000_000, ..before.clone() };
        let text = View::new(&replaced, &now, Sort::Rate, &names).text("/mnt");
        assert!(text.contains("the server was replaced: all numbers are those of the new one, in 6.0 s"), "{text}");
        // all that it counted, and not what is more than the old one had
        assert!(text.lines().any(|l| l.starts_with("GETATTR      183 ")), "{text}");
        assert!(!View::new(&before, &now, Sort::Rate, &names).text("/mnt").contains("replaced"));
    }

    #[test]
    fn tenants_near_a_limit_come_first() {
        let (before, now) = samples();
        let view = View::new(&before, &now, Sort::Rate, &names);
        let text = view.text("/mnt");
        let tenants: Vec<_> = text.lines().skip_while(|l| !l.starts_with("tenant")).collect();
        assert_eq!(
            tenants[0].split_whitespace().collect::<Vec<_>>().join(" "),
            "tenant domain per s p50 p99 used of limit inodes of limit read/s written/s served waiting commits/s state"
        );
        let row = |n: usize| view.tenants.rows[n].join(" | ");
        assert_eq!(
            row(0),
            "mail | 1 | 10 | 590 µs | 109 ms | 1 MiB | 25 % | 1200 | 120 % | - | 2 MiB 80 % | 45 % 90 % | 2.0 | 0 | FAILED, 1 MiB elsewhere"
        );
        assert!(
            row(1).starts_with("web")
                && row(1)
                    .ends_with("| 0 | 10 | 1.3 µs | 1.3 µs | 1 MiB | 25 % | 10 | 1 % | - | - | - | 0.0 | 2.0 | ok"),
            "{}",
            row(1)
        );
        assert_eq!(row(2), "free | 0 | 10 | 1.3 µs | 1.3 µs | 4 KiB | - | 1 | - | - | - | - | 0.0 | 2.0 | ok");
        assert_eq!(View::new(&before, &now, Sort::Name, &names).tenants.rows[0][0], "free");
        // who has none is shown none
        assert_eq!(view.tabs().last(), Some(&Tab::Tenants));
        let none = View::new(&before, &Sample { tenants: Vec::new(), ..now }, Sort::Rate, &names);
        assert!(!none.tabs().contains(&Tab::Tenants) && !none.text("/mnt").contains("tenant"));
    }

    #[test]
    fn devices_are_in_the_head_where_there_are_several_or_one_failed() {
        let (before, now) = samples();
        let of = |device, errors, state: &str, tenants| Device {
            device,
            errors,
            state: state.into(),
            name: format!("/dev/sd\u{1b}{device}"),
            bytes: 4 << 30,
            free: 1 << 30,
            tenants,
            ..Device::default()
        };
        let share = |name: &str, bytes| Share { name: name.into(), bytes };
        let head = |devices| View::new(&before, &Sample { devices, ..now.clone() }, Sort::Rate, &names).head;
        let lines = |devices| head(devices).into_iter().filter(|l| l.starts_with("device")).collect::<Vec<_>>();
        assert!(lines(vec![of(0, 0, "ok", vec![])]).is_empty());
        let one = lines(vec![of(0, 1, "ok", vec![])]);
        assert!(one.len() == 1 && one[0].ends_with(": 1 GiB of 4 GiB free, 1 error"), "{one:?}");
        let shares = vec![share("small", 1 << 10), share("large", 1 << 20)];
        let two = lines(vec![of(0, 0, "ok", shares), of(1, 0, "drained", vec![])]);
        assert!(two[0].ends_with("free; large 1 MiB, small 1 KiB") && two[1].ends_with("free, drained"), "{two:?}");
        assert!(!two[0].contains('\u{1b}'));
        let many = lines((0..9).map(|n| of(n, u64::from(n == 7), "ok", vec![])).collect());
        assert!(many.len() == 4 && many[3].starts_with("device 7"), "{many:?}");
    }

    #[test]
    fn owners_near_a_limit_are_in_the_head() {
        let (before, now) = samples();
        let quotas = json!([{"user": 1000, "used": 1 << 20, "space": 4 << 20, "inodes": 3},
                            {"user": 1001, "used": 3 << 20, "space": 4 << 20},
                            {"group": 50, "inodes": 9, "inodes_max": 10, "used": 4096},
                            {"project": 7, "used": 12 << 20, "soft_space": 4 << 20, "grace_is_over": true},
                            {"user": 1002, "space": 4096}]);
        let now = Sample { quotas: serde_json::from_value(quotas).unwrap(), ..now };
        let head = View::new(&before, &now, Sort::Rate, &names).head;
        assert_eq!(
            head[2..],
            [
                "limit of directory 7: 300 %, 12 MiB of 4 MiB, 0 inodes, its grace is over",
                "limit of group 50: 90 %, 4 KiB, 9 of 10 inodes",
                "limit of user 1001: 75 %, 3 MiB of 4 MiB, 0 inodes"
            ]
        );
    }

    #[test]
    fn rows_are_sorted() {
        let (before, now) = samples();
        let first = |sort| View::new(&before, &now, sort, &names).operations.rows[0][0].clone();
        assert_eq!(
            [Sort::Rate, Sort::Latency, Sort::Time, Sort::Name].map(first),
            ["GETATTR", "READ", "READ", "GETATTR"]
        );
        let domains = |sort| {
            View::new(&before, &now, sort, &names).domains.rows.iter().map(|r| r[..4].join(" ")).collect::<Vec<_>>()
        };
        assert_eq!(domains(Sort::Name), ["0 10 1.3 µs 1.3 µs", "1 10 590 µs 109 ms"]);
        assert!([Sort::Latency, Sort::Time].map(domains).iter().all(|d| d[0].starts_with("1 ")));
        // where the clock is slow, one of 16 is timed
        let slow = Sample { sampled: 16, ..now.clone() };
        assert_eq!(View::new(&before, &slow, Sort::Name, &names).domains.rows[0][1], "160");
        assert_eq!(View::new(&before, &now, Sort::Latency, &names).processes.rows[0][1], "11");
    }

    #[test]
    fn numbers_of_another_namespace_are_not_looked_up() {
        let ours = std::fs::metadata("/proc/self/ns/pid").unwrap().ino();
        let me = std::process::id();
        let name_in = |pid_namespace| names_for(&Sample { pid_namespace, ..Sample::default() })(me);
        assert_eq!(name_in(ours), name_of(me));
        assert_eq!(name_in(ours + 1), Some((me, "thread".into())));
    }

    #[test]
    fn who_may_not_see_processes_is_told() {
        let (before, now) = samples();
        let now = Sample { restricted: true, processes: Vec::new(), ..now };
        assert!(View::new(&before, &now, Sort::Rate, &names).text("/mnt").contains("only root"));
    }

    #[test]
    fn this_process_has_a_name() {
        let (process, name) = name_of(std::process::id()).unwrap();
        assert!(process == std::process::id() && !name.is_empty() && !name.ends_with('\n'));
    }
}
