//! `braidfs top`: what a mount does, again and again: on a terminal as a screen, elsewhere as text.
//!
//! `view` makes tables of two samples, `screen` draws them, this file asks and reads keys.

mod screen;
mod view;

use crate::cmd::stats::{place, sample_error};
use crate::failure::{Failure, Outcome};
use braidfs_fuse::control::sample;
use braidfs_fuse::watch::sample::Sample;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{self, EnterAlternateScreen};
use ratatui::layout::Rect;
use ratatui::{TerminalOptions, Viewport};
use rustix::process::{Signal, kill_current_process_group};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use view::{Sort, Tab, View};

/// Watch a mounted volume: rates and latencies by operation, domains, processes, tenants
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Keys: q ends; o, d, p and e (or Tab) show operations, domains, processes, and tenants if there are any; r, l, t \
    and n sort by rate, by latency (p99), by time and by name (domains: by latency, by time, else by number; tenants: by \
    latency, by name, else those nearest to a limit first); space asks at once.\n\n\
    A latency is the time from when the server has a request until it has answered it, without the way to the server and \
    back. Latencies are up to an eighth too long (those of processes up to a quarter), as a histogram's buckets are. A request \
    counts for the domain of the inode or directory that it names, and for the tenant of that domain. Processes are those that \
    asked meanwhile: `kernel` writes back and reads ahead; `?` has ended; `thread` is one of another pid namespace.\n\n\
    Above the tables are the devices, if there are several or one had errors, and the three users, groups or directories that are \
    nearest to a limit, if any have one. Only root and the user of the server see these limits, processes and tenants, and \
    have every request timed while this runs.\n\n\
    Examples:\n  braidfs top /mnt\n  braidfs top -d 5 /mnt              every five seconds\n  \
    braidfs top --batch -n 3 /mnt      three times as text, as `top -b` does"
)]
pub struct Args {
    /// Seconds between two looks
    #[arg(short, long, value_name = "SECONDS", default_value_t = 1.0, value_parser = parse_delay)]
    delay: f64,
    /// End after so many looks
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    rounds: Option<u64>,
    /// As text, all tables; also where standard output is no terminal
    #[arg(short, long)]
    batch: bool,
    /// The mount point of a mounted volume, or its devices, joined by commas
    #[arg(required = true, value_name = "MOUNTPOINT|DEVICE")]
    mountpoint: PathBuf,
}

fn parse_delay(text: &str) -> Result<f64, String> {
    let seconds = text.parse::<f64>().ok().filter(|s| (0.1..=1000.0).contains(s));
    seconds.ok_or_else(|| "use 0.1 to 1000 seconds".into())
}

pub fn run(args: &Args) -> Outcome {
    let place = place("cannot watch", &args.mountpoint)?;
    // The first look is what the next ones are compared with.
    let first = ask(&place, args.delay)?;
    if args.batch || !io::stdout().is_terminal() { batch(args, &place, first) } else { on_screen(args, &place, first) }
}

fn ask(place: &Path, delay: f64) -> Result<Sample, Failure> {
    // A look that comes late must not be taken for the end; no server watches for more than an hour (`parse_delay`).
    let watch_seconds = (delay * 3.0) as u32 + 10;
    sample(place, watch_seconds).map_err(|e| Failure::at("cannot watch", place.display(), sample_error(&e)))
}

fn batch(args: &Args, place: &Path, mut before: Sample) -> Outcome {
    for round in 0.. {
        if args.rounds.is_some_and(|n| round >= n) {
            break;
        }
        std::thread::sleep(Duration::from_secs_f64(args.delay));
        let now = ask(place, args.delay)?;
        let view = View::new(&before, &now, Sort::Rate, view::names_for(&now));
        crate::say(format_args!("{}", view.text(&place.to_string_lossy())))?;
        before = now;
    }
    Ok(0)
}

fn on_screen(args: &Args, place: &Path, first: Sample) -> Outcome {
    let failed = |e: io::Error| Failure::new(format!("top: the terminal: {e}"));
    // before the terminal changes: who ends this leaves it as it was
    let signal = Arc::new(AtomicUsize::new(0));
    for number in [SIGTERM, SIGHUP, SIGINT] {
        signal_hook::flag::register_usize(number, Arc::clone(&signal), number as usize).map_err(failed)?;
    }
    let mut terminal = take_terminal().map_err(failed)?;
    let ended = watch(args, place, first, &mut terminal, &signal);
    // a terminal that has gone cannot be restored
    let restored = ratatui::try_restore();
    match signal.load(Ordering::Relaxed) {
        0 => ended.and_then(|code| restored.map(|()| code).map_err(failed)),
        // what a shell shows for a program that a signal ended
        number => Ok(128 + number as u8),
    }
}

/// How often it is looked whether a signal has come.
const LOOK: Duration = Duration::from_millis(200);

/// Whether there is an event until then; false, too, where a signal has come.
fn wait(until: Instant, signal: &AtomicUsize) -> io::Result<bool> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if event::poll(left.min(LOOK))? {
            return Ok(true);
        }
        if left.is_zero() || signal.load(Ordering::Relaxed) != 0 {
            return Ok(false);
        }
    }
}

/// Takes the terminal; one that does not know its size, as some serial ones, counts as 80 columns of 24 lines.
fn take_terminal() -> io::Result<ratatui::DefaultTerminal> {
    if !matches!(terminal::size(), Ok((0, _) | (_, 0))) {
        return ratatui::try_init();
    }
    // taken with options it stays on its first screen
    execute!(io::stdout(), EnterAlternateScreen)?;
    let viewport = Viewport::Fixed(Rect::new(0, 0, 80, 24));
    ratatui::try_init_with_options(TerminalOptions { viewport })
}

/// Gives the terminal back and stops, as Ctrl-Z has every program do; takes it again when it goes on.
fn stop(terminal: &mut ratatui::DefaultTerminal) -> io::Result<()> {
    ratatui::try_restore()?;
    kill_current_process_group(Signal::TSTP)?;
    *terminal = take_terminal()?;
    Ok(())
}

fn watch(
    args: &Args,
    place: &Path,
    first: Sample,
    terminal: &mut ratatui::DefaultTerminal,
    signal: &AtomicUsize,
) -> Outcome {
    let failed = |e: io::Error| Failure::new(format!("top: the terminal: {e}"));
    let title = place.to_string_lossy();
    let (mut before, mut now) = (first.clone(), first);
    let (mut tab, mut sort, mut round) = (Tab::Operations, Sort::Rate, 0);
    let mut next = Instant::now() + Duration::from_secs_f64(args.delay);
    loop {
        let view = View::new(&before, &now, sort, view::names_for(&now));
        terminal.draw(|frame| screen::draw(frame, &view, tab, &title)).map_err(failed)?;
        if args.rounds.is_some_and(|n| round >= n) {
            return Ok(0);
        }
        let event = wait(next, signal).map_err(failed)?;
        if signal.load(Ordering::Relaxed) != 0 {
            return Ok(0);
        }
        if event {
            match event::read().map_err(failed)? {
                Event::Key(key) if key.kind != KeyEventKind::Release => {
                    match pressed(key, view.tabs(), &mut tab, &mut sort) {
                        Pressed::End => return Ok(0),
                        Pressed::Ask => {}
                        Pressed::Stop => {
                            stop(terminal).map_err(failed)?;
                            continue;
                        }
                        Pressed::Other => continue,
                    }
                }
                _ => continue,
            }
        }
        (before, now) = (now, ask(place, args.delay)?);
        next = Instant::now() + Duration::from_secs_f64(args.delay);
        round += 1;
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Pressed {
    End,
    Ask,
    Stop,
    Other,
}

fn pressed(key: KeyEvent, tabs: &[Tab], tab: &mut Tab, sort: &mut Sort) -> Pressed {
    match key.code {
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Pressed::End,
        KeyCode::Char('z') if key.modifiers.contains(KeyModifiers::CONTROL) => return Pressed::Stop,
        KeyCode::Char('q') | KeyCode::Esc => return Pressed::End,
        KeyCode::Char(' ') => return Pressed::Ask,
        KeyCode::Char('o') => *tab = Tab::Operations,
        KeyCode::Char('d') => *tab = Tab::Domains,
        KeyCode::Char('p') => *tab = Tab::Processes,
        KeyCode::Char('e') if tabs.contains(&Tab::Tenants) => *tab = Tab::Tenants,
        KeyCode::Tab | KeyCode::Right => *tab = tab.next(tabs),
        KeyCode::Char('r') => *sort = Sort::Rate,
        KeyCode::Char('l') => *sort = Sort::Latency,
        KeyCode::Char('t') => *sort = Sort::Time,
        KeyCode::Char('n') => *sort = Sort::Name,
        _ => {}
    }
    Pressed::Other
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_do_what_the_help_says() {
        let (mut tab, mut sort) = (Tab::Operations, Sort::Rate);
        let tabs = [Tab::Operations, Tab::Domains, Tab::Processes];
        let mut press = |c| {
            let ended = pressed(KeyEvent::new(c, KeyModifiers::NONE), &tabs, &mut tab, &mut sort);
            (ended, tab, sort)
        };
        assert_eq!(press(KeyCode::Char('d')), (Pressed::Other, Tab::Domains, Sort::Rate));
        assert_eq!(press(KeyCode::Tab), (Pressed::Other, Tab::Processes, Sort::Rate));
        // there are no tenants
        assert_eq!(press(KeyCode::Char('e')), (Pressed::Other, Tab::Processes, Sort::Rate));
        assert_eq!(press(KeyCode::Tab), (Pressed::Other, Tab::Operations, Sort::Rate));
        assert_eq!(press(KeyCode::Char('l')), (Pressed::Other, Tab::Operations, Sort::Latency));
        assert_eq!(press(KeyCode::Char(' ')).0, Pressed::Ask);
        assert_eq!(press(KeyCode::Char('q')).0, Pressed::End);
        let mut c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(pressed(c, &tabs, &mut tab, &mut sort), Pressed::End);
        let z = KeyEvent::new(KeyCode::Char('z'), KeyModifiers::CONTROL);
        assert_eq!(pressed(z, &tabs, &mut tab, &mut sort), Pressed::Stop);
        c.modifiers = KeyModifiers::NONE;
        assert_eq!(pressed(c, &tabs, &mut tab, &mut sort), Pressed::Other);
        let tabs = [Tab::Operations, Tab::Tenants];
        let e = KeyEvent::new(KeyCode::Char('e'), KeyModifiers::NONE);
        assert_eq!((pressed(e, &tabs, &mut tab, &mut sort), tab), (Pressed::Other, Tab::Tenants));
        assert_eq!((tab.next(&tabs), tab.next(&tabs[..1])), (Tab::Operations, Tab::Operations));
    }

    #[test]
    fn delays_have_bounds() {
        assert_eq!(parse_delay("0.5"), Ok(0.5));
        for text in ["0", "nan", "-1", "1001", "inf", "x"] {
            assert!(parse_delay(text).is_err(), "{text}");
        }
    }
}
