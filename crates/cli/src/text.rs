//! Sizes, UUIDs, modes, times and names as text. No I/O.

use braidfs::{Attr, FileKind, Timestamp};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

/// Parses `4096`, `64K`, `64M`, `1.5GiB`, `1T` (powers of 1024).
///
/// # Errors
/// A message for the user.
pub fn parse_size(text: &str) -> Result<u64, String> {
    if text.starts_with('-') {
        return Err("a size is positive: write 4096, 64M or 10G (powers of 1024)".into());
    }
    let binary = parse_size::Config::new().with_binary();
    binary.parse_size(text).map_err(|e| format!("{e}: write 4096, 64M or 10G (powers of 1024)"))
}

/// `1.5 GiB`; exact sizes without a fraction.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let unit = (0..UNITS.len()).rev().find(|&u| bytes >> (10 * u) > 0).unwrap_or(0);
    let scaled = bytes as f64 / (1u64 << (10 * unit)) as f64;
    if scaled.fract() == 0.0 { format!("{scaled:.0} {}", UNITS[unit]) } else { format!("{scaled:.1} {}", UNITS[unit]) }
}

/// `1 error`, `2 errors`.
pub fn count(n: u64, one: &str, many: &str) -> String {
    format!("{n} {}", if n == 1 { one } else { many })
}

/// `3 days`: seconds, in the largest unit in which they are whole.
pub fn span(seconds: u64) -> String {
    let units = [(86_400, "day", "days"), (3600, "hour", "hours"), (60, "minute", "minutes"), (1, "second", "seconds")];
    let unit = units.iter().find(|u| seconds > 0 && seconds.is_multiple_of(u.0)).unwrap_or(&units[3]);
    count(seconds / unit.0, unit.1, unit.2)
}

/// `drwxr-xr-x`, as `ls -l` writes it.
pub fn mode(attr: &Attr) -> String {
    let m = attr.mode;
    let kind = match attr.kind() {
        FileKind::File => '-',
        FileKind::Dir => 'd',
        FileKind::Symlink => 'l',
        FileKind::Fifo => 'p',
        FileKind::Socket => 's',
        FileKind::Char => 'c',
        FileKind::Block => 'b',
    };
    let mut out = String::from(kind);
    for (shift, special, on, off) in [(6, 0o4000, 's', 'S'), (3, 0o2000, 's', 'S'), (0, 0o1000, 't', 'T')] {
        out.push(if m >> shift & 4 != 0 { 'r' } else { '-' });
        out.push(if m >> shift & 2 != 0 { 'w' } else { '-' });
        out.push(match (m & special != 0, m >> shift & 1 != 0) {
            (true, true) => on,
            (true, false) => off,
            (false, true) => 'x',
            (false, false) => '-',
        });
    }
    out
}

/// `2026-02-28 23:59:59` in UTC.
pub fn time(t: Timestamp) -> String {
    let (days, second) = (t.sec.div_euclid(86_400), t.sec.rem_euclid(86_400));
    // Days to a civil date (Howard Hinnant, "chrono-compatible low-level date algorithms"): years start in March.
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let doe = z.rem_euclid(146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let month_from_march = (5 * doy + 2) / 153;
    let day = doy - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = yoe + era * 400 + i64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02}", second / 3600, second / 60 % 60, second % 60)
}

/// A name for a terminal: control characters escaped, what is not UTF-8 replaced.
pub fn name(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    if text.chars().any(char::is_control) {
        return text.chars().map(|c| if c.is_control() { c.escape_default().to_string() } else { c.into() }).collect();
    }
    text.into_owned()
}

/// `dir/name`; no second slash behind a `/`.
pub fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    let mut path = dir.to_vec();
    if !path.is_empty() && !path.ends_with(b"/") {
        path.push(b'/');
    }
    path.extend_from_slice(name);
    path
}

/// A path without slashes at its end.
pub fn without_end(path: &[u8]) -> &[u8] {
    &path[..path.iter().rposition(|&b| b != b'/').map_or(0, |i| i + 1)]
}

/// The last name of a path; empty for `/`, `.` and `..`, which name no entry.
pub fn base_name(path: &[u8]) -> &[u8] {
    let path = without_end(path);
    let start = path.iter().rposition(|&b| b == b'/').map_or(0, |i| i + 1);
    match &path[start..] {
        b"." | b".." => b"",
        name => name,
    }
}

/// The path before its last name.
pub fn parent(path: &[u8]) -> &[u8] {
    &path[..without_end(path).iter().rposition(|&b| b == b'/').map_or(0, |i| i + 1)]
}

/// Bytes as an `OsString`.
pub fn os_string(bytes: Vec<u8>) -> OsString {
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_have_the_largest_unit() {
        let spans = [0, 1, 90, 120, 3600, 86_399, 259_200].map(span);
        assert_eq!(
            spans.map(|s| s.replace(' ', "")).join(" "),
            "0seconds 1second 90seconds 2minutes 1hour 86399seconds 3days"
        );
    }

    #[test]
    fn sizes_parse_and_print() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64K", 65_536),
            ("32MiB", 32 << 20),
            ("16t", 16 << 40),
            ("7B", 7),
            ("1.5G", 3 << 29),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "M", "12X", "-1", "99999999999999999999", "99999999P"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
        assert_eq!(size(32 << 20), "32 MiB");
        assert_eq!(size((3 << 30) / 2), "1.5 GiB");
        assert_eq!(size(0), "0 B");
        assert_eq!(size(u64::MAX), "16 EiB");
    }

    #[test]
    fn times_are_civil() {
        assert_eq!(time(Timestamp { sec: 0, nsec: 0 }), "1970-01-01 00:00:00");
        assert_eq!(time(Timestamp { sec: 951_827_696, nsec: 0 }), "2000-02-29 12:34:56");
        assert_eq!(time(Timestamp { sec: -1, nsec: 0 }), "1969-12-31 23:59:59");
        assert_eq!(time(Timestamp { sec: 4_107_542_399, nsec: 0 }), "2100-02-28 23:59:59");
    }

    #[test]
    fn base_names() {
        for (path, base) in [("/a/b", "b"), ("a", "a"), ("a/b//", "b"), ("/", ""), ("..", ""), ("a/.", ""), ("", "")] {
            assert_eq!(base_name(path.as_bytes()), base.as_bytes(), "{path}");
        }
        for (path, above) in [("/a/b", "/a/"), ("a", ""), ("a/b//", "a/"), ("/a", "/"), ("/", ""), ("", "")] {
            assert_eq!(parent(path.as_bytes()), above.as_bytes(), "{path}");
        }
        assert_eq!(join(b"/", b"x"), b"/x");
        assert_eq!(join(b"", b"x"), b"x");
        assert_eq!(join(b"a", b"x"), b"a/x");
    }
}
