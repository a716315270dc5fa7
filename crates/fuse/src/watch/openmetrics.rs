//! A sample as text of OpenMetrics 1.0.

use super::sample::{Device, Domain, Latency, Quota, Rate, Sample, Serving, Tenant};
use std::fmt::{Display, Write};

/// Of the HTTP answer.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Bounds of the histograms: 2 to these powers, nanoseconds (1 µs to 17 s); each is the end of a bucket of ours.
const BOUNDS: std::ops::RangeInclusive<u32> = 10..=34;

struct Text(String);

impl Text {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a String cannot fail, here and below.
        let _ = writeln!(self.0, "# TYPE {name} {kind}");
        if let Some(unit) = ["seconds", "bytes"].into_iter().find(|u| name.ends_with(&format!("_{u}"))) {
            let _ = writeln!(self.0, "# UNIT {name} {unit}");
        }
        let _ = writeln!(self.0, "# HELP {name} {help}");
    }

    fn line(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        let labels: Vec<String> = labels.iter().map(|(k, v)| format!("{k}=\"{}\"", escape(v))).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let _ = writeln!(self.0, "{name}{labels} {value}");
    }
}

/// For `help` of a histogram.
const DURATION: &str = "of the requests that were timed; the sum is that of the middles of buckets.";

impl Text {
    /// One histogram of a family.
    fn histogram(&mut self, name: &str, label: (&str, &str), latency: &Latency) {
        for bound in BOUNDS {
            let (le, n) = (seconds(1 << bound), latency.up_to(1 << bound));
            self.line(&format!("{name}_bucket"), &[label, ("le", &le)], n);
        }
        self.line(&format!("{name}_bucket"), &[label, ("le", "+Inf")], latency.count());
        self.line(&format!("{name}_count"), &[label], latency.count());
        self.line(&format!("{name}_sum"), &[label], seconds(latency.about_sum()));
    }
}

/// As blkid(8) and `braidfs probe` write it.
fn with_dashes(uuid: &str) -> String {
    uuid::Uuid::try_parse(uuid).map_or_else(|_| uuid.into(), |u| u.to_string())
}

fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// See the module.
pub(crate) fn text(s: &Sample) -> String {
    let mut t = Text(String::new());
    t.family("braidfs_volume", "info", "The volume and its server.");
    t.line("braidfs_volume_info", &[("uuid", &with_dashes(&s.uuid)), ("label", &s.label), ("version", &s.version)], 1);
    t.family("braidfs_uptime_seconds", "gauge", "Time since the mount.");
    t.line("braidfs_uptime_seconds", &[], seconds(s.uptime_ns));
    t.family("braidfs_requests", "counter", "Requests of the kernel.");
    s.operations.iter().for_each(|o| t.line("braidfs_requests_total", &[("operation", &o.name)], o.requests));
    t.family("braidfs_deferred_requests", "counter", "Requests that another thread answered.");
    s.operations.iter().for_each(|o| t.line("braidfs_deferred_requests_total", &[("operation", &o.name)], o.deferred));
    t.family("braidfs_request_errors", "counter", "Requests answered with an error.");
    s.operations.iter().for_each(|o| t.line("braidfs_request_errors_total", &[("operation", &o.name)], o.errors));
    t.family("braidfs_data_bytes", "counter", "Data read and written.");
    for o in s.operations.iter().filter(|o| o.bytes > 0) {
        t.line("braidfs_data_bytes_total", &[("operation", &o.name)], o.bytes);
    }
    let name = "braidfs_request_duration_seconds";
    t.family(name, "histogram", &format!("Time until the answer, {DURATION}"));
    for o in &s.operations {
        t.histogram(name, ("operation", &o.name), &o.latency);
    }
    domains(&mut t, &s.domains);
    let c = s.cache;
    for (name, value, help) in [
        ("braidfs_cache_budget_bytes", c.budget, "What the server's cache may take."),
        ("braidfs_cache_data_bytes", c.data, "Data in it."),
        ("braidfs_cache_dirty_bytes", c.dirty, "Data in it that is not written yet."),
        ("braidfs_cache_index_bytes", c.index, "Names and extents in it."),
    ] {
        t.family(name, "gauge", help);
        t.line(name, &[], value);
    }
    t.family("braidfs_cache_hits", "counter", "Reads that the server's cache answered alone.");
    t.line("braidfs_cache_hits_total", &[], c.hits);
    t.family("braidfs_cache_misses", "counter", "Reads that waited for the device.");
    t.line("braidfs_cache_misses_total", &[], c.misses);
    devices(&mut t, &s.devices);
    tenants(&mut t, s);
    quotas(&mut t, &s.quotas);
    t.0.push_str("# EOF\n");
    t.0
}

/// Name, what it says of a thing, if anything, and what that is.
type Gauge<T> = (&'static str, fn(&T) -> Option<u64>, &'static str);

/// Families of gauges, with what `line` writes for each of the things.
fn gauges<T>(t: &mut Text, all: &[Gauge<T>], things: &[T], line: impl Fn(&mut Text, &str, &T, u64)) {
    for (name, of, help) in all {
        t.family(name, "gauge", help);
        for (thing, n) in things.iter().filter_map(|thing| Some((thing, of(thing)?))) {
            line(t, name, thing, n);
        }
    }
}

fn devices(t: &mut Text, devices: &[Device]) {
    let all: [Gauge<Device>; 5] = [
        ("braidfs_device_bytes", |d| Some(d.bytes), "Room for data and metadata on a device."),
        ("braidfs_device_free_bytes", |d| Some(d.free), "What of it is not used."),
        ("braidfs_device_groups", |d| Some(d.groups.into()), "Block groups."),
        ("braidfs_device_free_groups", |d| Some(d.free_groups.into()), "Block groups that no domain has."),
        ("braidfs_device_drained", |d| Some((d.state == "drained").into()), "1: nothing new comes to lie on it."),
    ];
    let number = |d: &Device| d.device.to_string();
    gauges(t, &all, devices, |t, name, d, n| t.line(name, &[("device", &number(d))], n));
    t.family("braidfs_device_errors", "counter", "Requests that a device answered with an error.");
    devices.iter().for_each(|d| t.line("braidfs_device_errors_total", &[("device", &number(d))], d.errors));
    let name = "braidfs_tenant_device_bytes";
    t.family(name, "gauge", "Data and metadata of a tenant on a device.");
    for d in devices {
        d.tenants.iter().for_each(|s| t.line(name, &[("tenant", &s.name), ("device", &number(d))], s.bytes));
    }
}

/// What users, groups and directories use of their limits; of what is not limited there is no line.
fn quotas(t: &mut Text, quotas: &[Quota]) {
    let all: [Gauge<Quota>; 7] = [
        ("braidfs_quota_used_bytes", |q| Some(q.used), "Space that a user, a group or a directory with limits uses."),
        ("braidfs_quota_limit_bytes", |q| q.space, "Space that it may use."),
        ("braidfs_quota_soft_limit_bytes", |q| q.soft_space, "Space that it may use for longer than its grace."),
        ("braidfs_quota_inodes", |q| Some(q.inodes), "Inodes that it has."),
        ("braidfs_quota_inodes_limit", |q| q.inodes_max, "Inodes that it may have."),
        ("braidfs_quota_soft_inodes_limit", |q| q.soft_inodes, "Inodes that it may have for longer than its grace."),
        ("braidfs_quota_grace_over", |q| Some(q.grace_is_over.into()), "1: a soft limit is a hard one by now."),
    ];
    gauges(t, &all, quotas, |t, name, quota, n| {
        let (kind, id) = quota.whose();
        t.line(name, &[("kind", kind), ("id", &id.to_string())], n);
    });
}

/// What tenants use of their limits; of what is not limited there is no line.
fn tenants(t: &mut Text, s: &Sample) {
    let tenants = &s.tenants;
    let all: [Gauge<Tenant>; 8] = [
        ("braidfs_tenant_used_bytes", |t| Some(t.used), "Space that a tenant uses."),
        ("braidfs_tenant_limit_bytes", |t| t.space, "Space that it may use."),
        ("braidfs_tenant_soft_limit_bytes", |t| t.soft_space, "Space that it may use for longer than its grace."),
        ("braidfs_tenant_cached_bytes", |t| Some(t.cached), "What it holds of the cache."),
        ("braidfs_tenant_cache_limit_bytes", |t| t.memory_max, "What it may hold of the cache."),
        ("braidfs_tenant_inodes", |t| Some(t.inodes), "Inodes that it has."),
        ("braidfs_tenant_inodes_limit", |t| t.inodes_max, "Inodes that it may have."),
        (
            "braidfs_tenant_elsewhere_bytes",
            |t| Some(t.elsewhere).filter(|_| !t.devices.is_empty()),
            "What it has on devices that it may not use.",
        ),
    ];
    gauges(t, &all, tenants, |t, name, tenant, n| t.line(name, &[("tenant", &tenant.name)], n));
    let name = "braidfs_tenant_request_duration_seconds";
    t.family(name, "histogram", &format!("Time until the answer to what is asked of a tenant's files, {DURATION}"));
    for tenant in tenants {
        // of a domain that nobody has asked there is nothing to tell
        if let Some(d) = s.domains.iter().find(|d| d.domain == tenant.domain && d.latency.count() > 0) {
            t.histogram(name, ("tenant", &tenant.name), &d.latency);
        }
    }
    type OfRate = fn(&Rate) -> Option<String>;
    let rates: [(&str, &str, &str, OfRate, &str); 7] = [
        (
            "braidfs_tenant_rate_limit_bytes",
            "",
            "gauge",
            |r| r.bytes_per_second.map(|n| n.to_string()),
            "Bytes a second that a tenant may read or write.",
        ),
        (
            "braidfs_tenant_rate_limit_requests",
            "",
            "gauge",
            |r| r.requests_per_second.map(|n| n.to_string()),
            "Requests a second.",
        ),
        (
            "braidfs_tenant_charged_bytes",
            "_total",
            "counter",
            |r| Some(r.bytes.to_string()),
            "Bytes that it asked of the device while there was a limit.",
        ),
        ("braidfs_tenant_charged_requests", "_total", "counter", |r| Some(r.requests.to_string()), "Such requests."),
        (
            "braidfs_tenant_debt_bytes",
            "",
            "gauge",
            |r| Some(r.debt_bytes.to_string()),
            "Bytes of these that who comes next waits for.",
        ),
        ("braidfs_tenant_waits", "_total", "counter", |r| Some(r.waits.to_string()), "Calls that waited for a limit."),
        (
            "braidfs_tenant_waited_seconds",
            "_total",
            "counter",
            |r| Some(seconds(r.waited_ns)),
            "How long all of them did.",
        ),
    ];
    for (name, suffix, kind, of, help) in rates {
        t.family(name, kind, help);
        for tenant in tenants {
            for (way, rate) in [("read", &tenant.read), ("write", &tenant.written)] {
                if rate.bytes_per_second.or(rate.requests_per_second).is_some()
                    && let Some(value) = of(rate)
                {
                    t.line(&format!("{name}{suffix}"), &[("tenant", &tenant.name), ("way", way)], value);
                }
            }
        }
    }
    serving(t, tenants);
}

/// Processor time that is spent on tenants with a limit.
fn serving(t: &mut Text, tenants: &[Tenant]) {
    type OfServing = fn(&Serving) -> String;
    let all: [(&str, &str, &str, OfServing, &str); 5] = [
        (
            "braidfs_tenant_serving_limit_ratio",
            "",
            "gauge",
            |s| seconds(s.ns_per_second.unwrap_or(0)),
            "Processors that may be busy with a tenant.",
        ),
        ("braidfs_tenant_serving_seconds", "_total", "counter", |s| seconds(s.ns), "Processor time spent on it."),
        (
            "braidfs_tenant_serving_debt_seconds",
            "",
            "gauge",
            |s| seconds(s.debt_ns),
            "Of it what who comes next waits for.",
        ),
        ("braidfs_tenant_serving_waits", "_total", "counter", |s| s.waits.to_string(), "Requests that waited for it."),
        (
            "braidfs_tenant_serving_waited_seconds",
            "_total",
            "counter",
            |s| seconds(s.waited_ns),
            "How long all of them did.",
        ),
    ];
    for (name, suffix, kind, of, help) in all {
        t.family(name, kind, help);
        for tenant in tenants.iter().filter(|t| t.serving.ns_per_second.is_some()) {
            t.line(&format!("{name}{suffix}"), &[("tenant", &tenant.name)], of(&tenant.serving));
        }
    }
}

fn domains(t: &mut Text, domains: &[Domain]) {
    type Of = fn(&Domain) -> u64;
    let gauges: [(&str, Of, &str); 5] = [
        ("braidfs_domain_blocks", |d| d.blocks, "Data blocks of 4 KiB in the groups of a domain."),
        ("braidfs_domain_free_blocks", |d| d.free_blocks, "Free ones."),
        ("braidfs_domain_journal_blocks", |d| d.journal_blocks, "Blocks of a domain's journal."),
        ("braidfs_domain_journal_used_blocks", |d| d.journal_used, "Blocks of it in use."),
        ("braidfs_domain_failed", |d| u64::from(d.failed.is_some()), "1: the domain failed and is read-only."),
    ];
    let counters: [(&str, Of, &str); 6] = [
        ("braidfs_commits", |d| d.commits, "Commits of a domain."),
        ("braidfs_commit_joiners", |d| d.joiners, "Threads that joined commits which others led."),
        ("braidfs_checkpoints", |d| d.checkpoints, "Checkpoints of a domain."),
        ("braidfs_fast_syncs", |d| d.fast_syncs, "fsyncs that needed no commit."),
        ("braidfs_cleaned_blocks", |d| d.cleaned_blocks, "Blocks that the cleaner moved."),
        ("braidfs_relocated_blocks", |d| d.relocated_blocks, "Blocks in groups that a domain emptied for others."),
    ];
    let families = gauges.map(|g| ("gauge", "", g)).into_iter().chain(counters.map(|c| ("counter", "_total", c)));
    for (kind, suffix, (name, of, help)) in families {
        t.family(name, kind, help);
        for d in domains {
            t.line(&format!("{name}{suffix}"), &[("domain", &d.domain.to_string())], of(d));
        }
    }
    let name = "braidfs_domain_request_duration_seconds";
    t.family(name, "histogram", &format!("Time until the answer to what is asked of a domain, {DURATION}"));
    for d in domains.iter().filter(|d| d.latency.count() > 0) {
        t.histogram(name, ("domain", &d.domain.to_string()), &d.latency);
    }
}

/// Exact: nanoseconds as a decimal fraction.
fn seconds(nanos: u64) -> String {
    let text = format!("{}.{:09}", nanos / 1_000_000_000, nanos % 1_000_000_000);
    let text = text.trim_end_matches('0');
    if text.ends_with('.') { format!("{text}0") } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};

    fn sample() -> Sample {
        serde_json::from_value(serde_json::json!({"layout": 1, "uptime_ns": 1_500_000_000, "uuid": "0123456789abcdef0123456789abcdef", "label": "a\"b\\c\nd",
            "operations": [{"opcode": 15, "name": "READ", "requests": 9, "bytes": 4096, "latency": [[9, 5], [80, 2], [239, 1]]},
                           {"opcode": 3, "name": "GETATTR", "requests": 1}],
            "domains": [{"domain": 0, "commits": 4}, {"domain": 1, "failed": "x", "latency": [[9, 3], [239, 1]]}],
            "devices": [{"device": 0, "state": "ok", "bytes": 8192, "free": 4096, "tenants": [{"name": "web\n", "bytes": 4096}]},
                        {"device": 1, "state": "drained", "groups": 3, "free_groups": 2, "errors": 5}],
            "quotas": [{"user": 1000, "used": 4096, "space": 8192}, {"group": 1000, "inodes": 3, "inodes_max": 2, "grace_is_over": true},
                       {"project": 7, "directory": 99, "used": 1}],
            "tenants": [{"name": "free", "used": 4096},
                        {"name": "web\n", "domain": 1, "space": 8192, "devices": [0, 2], "elsewhere": 4096, "serving": {"ns_per_second": 500_000_000, "ns": 7, "waits": 3}, "written": {"requests_per_second": 10, "bytes": 7, "waited_ns": 1_500_000_000}}]}))
        .unwrap()
    }

    /// {sample name with labels: value}; panics where the text is not as the specification has it.
    fn parse(text: &str) -> BTreeMap<String, f64> {
        let (mut family, mut seen, mut values) = (("", ""), BTreeSet::new(), BTreeMap::new());
        let body = text.strip_suffix("# EOF\n").expect("ends with EOF");
        for line in body.lines() {
            if let Some(rest) = line.strip_prefix("# ") {
                let mut words = rest.splitn(3, ' ');
                let (what, name, rest) = (words.next().unwrap(), words.next().unwrap(), words.next().unwrap());
                match what {
                    "TYPE" => {
                        assert!(seen.insert(name), "{name} again");
                        assert!(["counter", "gauge", "histogram", "info"].contains(&rest), "{line}");
                        family = (name, rest);
                    }
                    "UNIT" => assert!(name == family.0 && name.ends_with(&format!("_{rest}")), "{line}"),
                    "HELP" => assert_eq!(name, family.0),
                    _ => panic!("{line}"),
                }
                continue;
            }
            let (name, value) = line.rsplit_once(' ').unwrap();
            let bare = name.split('{').next().unwrap();
            let suffix = bare.strip_prefix(family.0).expect(line);
            let good: &[&str] = match family.1 {
                "counter" => &["_total"],
                "histogram" => &["_bucket", "_count", "_sum"],
                "info" => &["_info"],
                _ => &[""],
            };
            assert!(good.contains(&suffix), "{line}");
            assert!(values.insert(name.to_owned(), value.parse::<f64>().unwrap()).is_none(), "{line} again");
        }
        values
    }

    #[test]
    fn the_text_is_as_the_specification_has_it() {
        let values = parse(&text(&sample()));
        let of = |name: &str| *values.get(name).unwrap_or_else(|| panic!("{name} in {values:#?}"));
        assert_eq!(of("braidfs_uptime_seconds"), 1.5);
        assert_eq!(of("braidfs_requests_total{operation=\"READ\"}"), 9.0);
        assert_eq!(of("braidfs_domain_failed{domain=\"1\"}"), 1.0);
        assert_eq!(of("braidfs_device_bytes{device=\"0\"}") - of("braidfs_device_free_bytes{device=\"0\"}"), 4096.0);
        assert_eq!(
            (of("braidfs_device_drained{device=\"0\"}"), of("braidfs_device_drained{device=\"1\"}")),
            (0.0, 1.0)
        );
        assert_eq!(
            (of("braidfs_device_groups{device=\"1\"}"), of("braidfs_device_free_groups{device=\"1\"}")),
            (3.0, 2.0)
        );
        assert_eq!(
            (of("braidfs_device_errors_total{device=\"0\"}"), of("braidfs_device_errors_total{device=\"1\"}")),
            (0.0, 5.0)
        );
        assert_eq!(of("braidfs_tenant_device_bytes{tenant=\"web\\n\",device=\"0\"}"), 4096.0);
        assert_eq!(of("braidfs_tenant_used_bytes{tenant=\"free\"}"), 4096.0);
        assert_eq!(of("braidfs_tenant_limit_bytes{tenant=\"web\\n\"}"), 8192.0);
        assert_eq!(of("braidfs_tenant_charged_bytes_total{tenant=\"web\\n\",way=\"write\"}"), 7.0);
        assert_eq!(of("braidfs_tenant_waited_seconds_total{tenant=\"web\\n\",way=\"write\"}"), 1.5);
        assert_eq!(of("braidfs_tenant_serving_limit_ratio{tenant=\"web\\n\"}"), 0.5);
        assert_eq!(of("braidfs_tenant_serving_seconds_total{tenant=\"web\\n\"}"), 7e-9);
        assert_eq!(of("braidfs_tenant_elsewhere_bytes{tenant=\"web\\n\"}"), 4096.0);
        assert!(!values.keys().any(|k| k.contains("serving") && k.contains("free")));
        assert_eq!(of("braidfs_quota_used_bytes{kind=\"user\",id=\"1000\"}"), 4096.0);
        assert_eq!(of("braidfs_quota_limit_bytes{kind=\"user\",id=\"1000\"}"), 8192.0);
        assert_eq!(of("braidfs_quota_inodes{kind=\"group\",id=\"1000\"}"), 3.0);
        assert_eq!(of("braidfs_quota_inodes_limit{kind=\"group\",id=\"1000\"}"), 2.0);
        assert_eq!(of("braidfs_quota_grace_over{kind=\"group\",id=\"1000\"}"), 1.0);
        assert_eq!(of("braidfs_quota_used_bytes{kind=\"directory\",id=\"7\"}"), 1.0);
        assert!(!values.contains_key("braidfs_quota_limit_bytes{kind=\"directory\",id=\"7\"}"));
        assert!(!values.keys().any(|k| k.contains("way=\"read\"") || k.contains("limit_bytes{tenant=\"free")));
        assert_eq!(
            of(
                "braidfs_volume_info{uuid=\"01234567-89ab-cdef-0123-456789abcdef\",label=\"a\\\"b\\\\c\\nd\",version=\"\"}"
            ),
            1.0
        );
        let bucket =
            |le: &str| of(&format!("braidfs_request_duration_seconds_bucket{{operation=\"READ\",le=\"{le}\"}}"));
        // the buckets 9, 80 and 239 end at 1.3 µs, 0.6 ms and above 17 s
        let have = ["0.000001024", "0.000002048", "0.000524288", "0.001048576", "17.179869184", "+Inf"].map(bucket);
        assert_eq!(have, [0.0, 5.0, 5.0, 7.0, 7.0, 8.0]);
        assert_eq!(of("braidfs_request_duration_seconds_count{operation=\"READ\"}"), 8.0);
        assert_eq!(of("braidfs_domain_request_duration_seconds_bucket{domain=\"1\",le=\"0.000002048\"}"), 3.0);
        assert_eq!(of("braidfs_tenant_request_duration_seconds_count{tenant=\"web\\n\"}"), 4.0);
        assert!(!values.contains_key("braidfs_tenant_request_duration_seconds_count{tenant=\"free\"}"));
    }

    #[test]
    fn the_dashboard_asks_for_what_there_is() {
        let text = text(&sample());
        let names: BTreeSet<&str> =
            text.lines().filter(|l| !l.starts_with('#')).map(|l| l.split(['{', ' ']).next().unwrap()).collect();
        let dashboard: serde_json::Value =
            serde_json::from_str(include_str!("../../../../contrib/grafana/braidfs.json")).unwrap();
        let mut asked = 0;
        for panel in dashboard["panels"].as_array().unwrap() {
            for target in panel["targets"].as_array().unwrap() {
                let query = target["expr"].as_str().unwrap();
                for word in query.split(|c: char| !c.is_ascii_alphanumeric() && c != '_') {
                    if word.starts_with("braidfs") {
                        assert!(names.contains(word), "{word} of {query}");
                        asked += 1;
                    }
                }
            }
        }
        assert!(asked > 10, "{asked}");
    }
}
