//! `braidfs man`: writes the manual pages, for packagers.

use crate::cmd::man_text;
use crate::cmd::option_table::{Again, How, Row, TABLE};
use crate::failure::{Failure, Outcome, host_error};
use crate::personality::HELPERS;
use crate::text;
use braidfs::Timestamp;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;

/// Write the manual pages, each into the directory of its section
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The date in them is that of SOURCE_DATE_EPOCH (seconds since 1970), where that is set, else today's.\n\n\
    Example:\n  braidfs man /usr/share/man"
)]
pub struct Args {
    /// Where to: man5 and man8 are made in it
    dir: PathBuf,
}

/// What they say they belong to.
const SOURCE: &str = concat!("braidfs ", env!("CARGO_PKG_VERSION"));

/// Writes `braidfs.8`, a page per command, those of the helpers, and `braidfs.5`.
pub fn run(args: &Args, root: clap::Command) -> Outcome {
    let date = date()?;
    let fail = |e: std::io::Error| Failure::at("cannot write manual pages to", args.dir.display(), host_error(&e));
    let write = |title: &str, section: &str, page: &str| {
        let dir = args.dir.join(format!("man{section}"));
        std::fs::create_dir_all(&dir)?;
        std::fs::write(dir.join(format!("{title}.{section}")), page)
    };
    // the directory above is there, or was written wrong
    if !args.dir.is_dir() {
        std::fs::create_dir(&args.dir).map_err(fail)?;
    }
    let mut root = root;
    root.build();
    let root = with_aliases(root);
    for page in pages(&root) {
        write(&page.title, "8", &page.text(&date).map_err(fail)?).map_err(fail)?;
    }
    write("mount.braidfs", "8", &mount_page(&date)).map_err(fail)?;
    write("braidfs", "5", &format!(".TH BRAIDFS 5 {date} \"{SOURCE}\"\n{}", man_text::FORMAT_PAGE)).map_err(fail)?;
    Ok(0)
}

/// Of the pages: that of what they were made from, where whoever makes them tells it, as `make install` does, and else today's.
fn date() -> Result<String, Failure> {
    const OF_THE_SOURCES: &str = "SOURCE_DATE_EPOCH";
    let sec = match std::env::var(OF_THE_SOURCES) {
        Ok(seconds) => seconds.parse().map_err(|_| {
            Failure::new(format!(
                "man: {OF_THE_SOURCES}={seconds:?} is no number of seconds since 1970: correct it or unset it"
            ))
        })?,
        Err(_) => std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs() as i64),
    };
    let mut text = text::time(Timestamp { sec, nsec: 0 });
    text.truncate(text.find(' ').unwrap_or(text.len()));
    Ok(text)
}

/// A page that is made from the command line's own help.
struct Page {
    title: String,
    /// The command's name; none for that of all.
    sub: String,
    command: clap::Command,
}

fn pages(root: &clap::Command) -> Vec<Page> {
    let mut pages = vec![Page { title: "braidfs".into(), sub: String::new(), command: root.clone() }];
    for command in visible(root) {
        let sub = command.get_name().to_string();
        // mount.braidfs has a page of its own
        if let Some(&(helper, _)) = HELPERS.iter().find(|h| h.1 == sub) {
            let command = command.clone().name(helper).display_name(helper).bin_name(helper);
            pages.push(Page { title: helper.into(), sub: sub.clone(), command });
        }
        let title = format!("braidfs-{sub}");
        pages.push(Page { command: command.clone().name(title.clone()), title, sub });
    }
    pages
}

impl Page {
    fn text(&self, date: &str) -> std::io::Result<String> {
        let title = self.title.to_uppercase();
        let man = clap_mangen::Man::new(self.command.clone()).title(title).section("8").date(date).source(SOURCE);
        let man = man.manual("braidfs");
        let mut out = Vec::new();
        man.render_title(&mut out)?;
        man.render_name_section(&mut out)?;
        writeln!(out, ".SH SYNOPSIS\n{}", synopsis(&self.command))?;
        man.render_description_section(&mut out)?;
        man.render_options_section(&mut out)?;
        if self.sub.is_empty() {
            man.render_subcommands_section(&mut out)?;
        } else if self.command.has_subcommands() {
            out.extend_from_slice(b".SH COMMANDS\n");
            visible(&self.command).try_for_each(|sub| nested(sub, &mut out))?;
        }
        let help = self.command.get_after_help().map(ToString::to_string).unwrap_or_default();
        Ok(tidy(&String::from_utf8_lossy(&out)) + &man_text::sections(&self.sub, &self.title, &help))
    }
}

/// With the other names of each option in what is said of it, in all commands.
fn with_aliases(command: clap::Command) -> clap::Command {
    let named = |a: clap::Arg| {
        let short = a.get_visible_short_aliases().unwrap_or_default().into_iter().map(|c| format!("-{c}"));
        let long = a.get_visible_aliases().unwrap_or_default().into_iter().map(|name| format!("--{name}"));
        let names: Vec<String> = short.chain(long).collect();
        if names.is_empty() {
            return a;
        }
        let help = a.get_help().map(ToString::to_string).unwrap_or_default();
        a.help(format!("{help} [also {}]", names.join(", ")))
    };
    command.mut_args(named).mut_subcommands(with_aliases)
}

/// How a command is called: with the value of each option, and what may be there several times.
fn synopsis(command: &clap::Command) -> String {
    let mut words = vec![format!("\\fB{}\\fR", plain(command.get_bin_name().unwrap_or(command.get_name())))];
    let shown = |a: &&clap::Arg| !a.is_hide_set();
    let choices: Vec<_> = command.get_groups().filter(|g| g.is_required_set() && !(*g).clone().is_multiple()).collect();
    let chosen = |a: &&clap::Arg| choices.iter().any(|g| g.get_args().any(|id| id == a.get_id()));
    let mut options: Vec<_> = command.get_opts().chain(flags(command)).filter(shown).filter(|a| !chosen(a)).collect();
    // those of every command come last
    options.sort_by_key(|a| (a.get_id() == "help", a.is_global_set()));
    for option in options {
        words.push(if option.is_required_set() { names_of(option) } else { format!("[{}]", names_of(option)) });
    }
    for choice in &choices {
        let one = |id: &clap::Id| command.get_arguments().find(|a| a.get_id() == id).filter(shown).map(names_of);
        let all: Vec<String> = choice.get_args().filter_map(one).collect();
        if !all.is_empty() {
            words.push(format!("{{{}}}", all.join("|\\:")));
        }
    }
    for place in command.get_positionals().filter(shown) {
        let values = values_of(place);
        // what has several names is all of them, though calls by the program itself have none
        let required = place.is_required_set() || place.get_value_names().is_some_and(|names| names.len() > 1);
        words.push(if required { values } else { format!("[{values}]") });
    }
    if command.has_subcommands() {
        words.push("\\fICOMMAND\\fR".into());
    }
    words.join(" ")
}

fn flags(command: &clap::Command) -> impl Iterator<Item = &clap::Arg> {
    command.get_arguments().filter(|a| !a.is_positional() && !a.get_action().takes_values())
}

/// `-s|--size BYTES`.
fn names_of(option: &clap::Arg) -> String {
    let names =
        option.get_short().map(|c| format!("-{c}")).into_iter().chain(option.get_long().map(|l| format!("--{l}")));
    let names: Vec<String> = names.map(|n| format!("\\fB{}\\fR", plain(&n))).collect();
    let names = names.join("|\\:");
    if !option.get_action().takes_values() {
        return names;
    }
    let optional = option.get_num_args().is_some_and(|n| n.min_values() == 0);
    let (values, equals) = (values_of(option), option.is_require_equals_set());
    // no line breaks before a value
    match (optional, equals) {
        (false, false) => format!("{names}\\ {values}"),
        (false, true) => format!("{names}={values}"),
        (true, false) => format!("{names}\\ [{values}]"),
        (true, true) => format!("{names}[={values}]"),
    }
}

/// `DEVICE...`: what an option, or a place of its own, takes.
fn values_of(of: &clap::Arg) -> String {
    let mut names: Vec<String> = match of.get_value_names() {
        Some(names) => names.iter().map(ToString::to_string).collect(),
        None => vec![of.get_id().as_str().to_uppercase()],
    };
    let several = of.is_positional() && matches!(of.get_action(), clap::ArgAction::Append);
    if several || of.get_num_args().is_some_and(|n| n.max_values() > names.len()) {
        // of several names the last one stands for one thing
        names[0] += "...";
    }
    names.iter().map(|n| format!("\\fI{}\\fR", plain(n))).collect::<Vec<_>>().join("\\ ")
}

fn visible(of: &clap::Command) -> impl Iterator<Item = &clap::Command> {
    of.get_subcommands().filter(|s| !s.is_hide_set() && s.get_name() != "help")
}

/// A command of a command, as a part of the page of that: what it does, how it is called, and its options but for those
/// that all have.
fn nested(command: &clap::Command, out: &mut Vec<u8>) -> std::io::Result<()> {
    let everywhere = |a: &clap::Arg| a.is_global_set() || a.get_id() == "help";
    let command = command.clone().mut_args(|a| if everywhere(&a) { a.hide(true) } else { a });
    let man = clap_mangen::Man::new(command.clone());
    let mut text = format!(".na\n{}\n.ad\n.PP\n", synopsis(&command)).into_bytes();
    man.render_description_section(&mut text)?;
    if command.get_arguments().any(|a| !a.is_hide_set()) {
        man.render_options_section(&mut text)?;
    }
    writeln!(out, ".SS {}", plain(command.get_name()))?;
    // the headings of a page, and what stands above each
    let heading = |line: &&str| [".SH ", ".ie ", ".el "].iter().any(|h| line.starts_with(h));
    let text = String::from_utf8_lossy(&text);
    text.lines().filter(|l| !heading(l)).try_for_each(|line| writeln!(out, "{line}"))
}

/// Leaves out line breaks beside empty lines, which say the same.
fn tidy(page: &str) -> String {
    let lines: Vec<&str> = page.lines().collect();
    let space = |i: Option<usize>| i.and_then(|i| lines.get(i)).is_some_and(|l| l.is_empty());
    let needed = |i: &usize| lines[*i] != ".br" || !(space(i.checked_sub(1)) || space(Some(i + 1)));
    (0..lines.len()).filter(needed).map(|i| format!("{}\n", lines[i])).collect()
}

/// Text for roff: no character of it is a command.
pub fn plain(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

/// `mount.braidfs.8`: the helper, and the table of options.
fn mount_page(date: &str) -> String {
    let mut rows = String::new();
    for row in TABLE {
        // writing to a String cannot fail
        let _ = writeln!(
            rows,
            "T{{\n.na\n{}\nT}}\t{}\t{}\tT{{\n.na\n{}\nT}}",
            names(row),
            how(row),
            again(row),
            plain(row.what)
        );
    }
    format!("'\\\" t\n.TH MOUNT.BRAIDFS 8 {date} \"{SOURCE}\"\n{MOUNT_HEAD}{rows}{MOUNT_TAIL}")
}

fn names(row: &Row) -> String {
    // a value that stands for any is shown as such
    let shown = |name: &&str| match name.split_once('=') {
        Some(
            (name @ ("data" | "fuseblk" | "latency" | "numa" | "overwrite" | "transport"), value)
            | (name @ "cache", value @ ("back" | "through")),
        ) => {
            format!("{name}={value}")
        }
        Some((name, _)) => format!("{name}="),
        None => (*name).to_string(),
    };
    let mut list: Vec<String> = row.names.iter().map(shown).collect();
    list.dedup();
    list.iter().map(|n| format!("\\fB\\%{}\\fR", plain(n))).collect::<Vec<_>>().join(", ")
}

fn how(row: &Row) -> &'static str {
    match row.how {
        How::Taken => "taken",
        How::Passed => "passed",
        How::Both => "both",
        How::Ignored => "ignored",
        How::Refused => "refused",
    }
}

fn again(row: &Row) -> &'static str {
    match row.again {
        Again::Changes => "changes",
        Again::Ignored => "ignored",
        Again::Fixed => "fixed",
        Again::Refused => "refused",
    }
}

const MOUNT_HEAD: &str = r".SH NAME
mount.braidfs \- mount a braidfs volume, or change how it is mounted
.SH SYNOPSIS
\fBmount\fR [\fB\-t braidfs\fR] [\fB\-o\fR \fIoptions\fR] \fIdevice\fR[\fB,\fR\fIdevice\fR...] \fIdirectory\fR
.br
\fBmount \-o remount,\fR\fIoptions\fR \fIdirectory\fR
.br
\fBmount.braidfs\fR \fIdevice\fR \fIdirectory\fR [\fB\-sfnv\fR] [\fB\-o\fR \fIoptions\fR]
.SH DESCRIPTION
mount(8) calls \fBmount.braidfs\fR for file systems of type braidfs; braidfs\-mount(8) is the same by hand.
A device is a block device or an image file; a volume of several devices is named by all of them.
A process in the background serves the mount until it is unmounted. The helper prints nothing where all is well.
.TP
\fB\-s\fR
Skip options that are unknown.
.TP
\fB\-f\fR
Check the options, and mount nothing.
.TP
\fB\-n\fR
No entry in mtab: there is none.
.TP
\fB\-v\fR
Log what is done.
.SH OPTIONS
What becomes of each option, at the mount and on a remount. \(lqTaken\(rq are those that braidfs acts on,
\(lqpassed\(rq those that the kernel does, \(lqboth\(rq those of both. On a remount \(lqfixed\(rq are those of
which another value than that of the mount is refused. What comes later wins. Any other option is an error.
.PP
.TS
tab(	);
lb 2 lb 2 lb 2 lb
lw(20n) 2 l 2 l 2 lw(28n).
Option	Mount	Remount	What it does
";

const MOUNT_TAIL: &str = r".TE
.SH REMOUNT
\fBmount \-o remount,ro\fR \fIdirectory\fR makes a mount read\-only. Where files are open for writing it is busy.
Everything is written to the devices and the volume marked clean there, as by umount(8).
.PP
\fBmount \-o remount,rw\fR \fIdirectory\fR makes it writable, also where it was mounted read\-only; what was left of a
crash is then written to the devices. It is refused where a device is read\-only, where another process reads the
volume, and where a part of the volume failed: unmount it and run fsck.braidfs(8).
.PP
Without the helper (\fBmount \-i\fR, or mount(2) called by another program) the kernel changes its own options and does
not tell the server: a mount made read\-only so refuses changes, and everything is on the devices, but the volume is not
marked clean, and access times may still be written. Only root can remount.
.SH SEVERAL MOUNT POINTS
A volume is mounted once. \fBmount \-\-bind\fR \fIdirectory\fR \fIother\fR shows it at another place, too; a second mount of
the same device is refused, also by another name of it: another path, a loop device of the image.
Several read\-only mounts of an image file, with a server each, are possible.
.SH FILES
.TP
\fI/etc/fstab\fR
A line for an image file, which the service \fIbraidfs\-fsck@\fR checks before (systemd itself checks no files, whatever the last
number is); the mount, and an unmount, may take longer than the 90 seconds after which systemd would end them:
.PP
.RS
.EX
/srv/disk.img  /mnt  braidfs  nofail,x\-systemd.mount\-timeout=1h,x\-systemd.requires=braidfs\-fsck@srv\-disk.img.service  0 0
.EE
.RE
.SH LOG
Warnings and errors of the process in the background go to the system's log, as \fBbraidfs\fR: journalctl \-t braidfs
shows them. With the option \fBlog=\fR, or \fIBRAIDFS_LOG_FILE\fR in the environment (of a unit for the mount, say),
more of it goes into that file instead. \fIBRAIDFS_LOG\fR is the level: error, warn, info, debug or trace.
\fIBRAIDFS_SYSLOG\fR is the socket of the system's log, in place of \fI/dev/log\fR; where it is empty nothing goes there.
.SH EXIT STATUS
0: it is mounted. 1: wrong usage, an option that is unknown or refused. 2: a system error. 32: the mount failed.
.SH EXAMPLES
A volume in an image file, with changes durable after ten seconds at the latest:
.PP
.RS
.EX
mount \-t braidfs \-o noatime,commit=10 /srv/disk.img /mnt
.EE
.RE
.PP
A volume of two devices:
.PP
.RS
.EX
mount \-t braidfs /dev/sdb,/dev/sdc /mnt
.EE
.RE
.SH SEE ALSO
braidfs(8), braidfs(5), braidfs\-mount(8), umount.braidfs(8), mkfs.braidfs(8), fsck.braidfs(8), mount(8), fstab(5)
";
