//! Draws tables on a terminal.

use super::view::{Tab, View};
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Cell, Paragraph, Row, Table};

/// The whole screen.
pub fn draw(frame: &mut Frame<'_>, view: &View, tab: Tab, title: &str) {
    let head = view.head.len() as u16;
    let parts = [1, head, 1].map(Constraint::Length).into_iter().chain([Constraint::Min(1), Constraint::Length(1)]);
    let areas = Layout::vertical(parts).split(frame.area());
    let (strong, reversed) = (Style::new().add_modifier(Modifier::BOLD), Style::new().add_modifier(Modifier::REVERSED));
    let mut tabs = vec![Span::styled(format!("braidfs {title}"), strong)];
    for &t in view.tabs() {
        tabs.push("  ".into());
        let name = format!(" {} ", format!("{t:?}").to_lowercase());
        tabs.push(Span::styled(name, if t == tab { reversed } else { Style::new() }));
    }
    frame.render_widget(Line::from(tabs), areas[0]);
    frame.render_widget(Paragraph::new(view.head.join("\n")), areas[1]);
    let table = view.table(tab);
    let right = |c: usize, text: &str| {
        let side = if c == 0 { Alignment::Left } else { Alignment::Right };
        Cell::from(Text::from(text.to_owned()).alignment(side))
    };
    let names = Row::new(table.columns.iter().enumerate().map(|(c, name)| right(c, name))).style(reversed);
    let rows = table.rows.iter().map(|row| Row::new(row.iter().enumerate().map(|(c, text)| right(c, text))));
    let widths = table.widths();
    // closer together where there is not room for all
    let fits = widths.iter().map(|w| w + 2).sum::<usize>() <= usize::from(areas[3].width) + 2;
    let widths = widths.into_iter().map(|w| Constraint::Length(w as u16));
    let spacing = if fits { 2 } else { 1 };
    frame.render_widget(Table::new(rows, widths).header(names).column_spacing(spacing), areas[3]);
    let tables = if view.tabs().contains(&Tab::Tenants) { "o d p e" } else { "o d p" };
    let keys = format!("q end   Tab, {tables} table   sort: r rate  l latency  t time  n name   space now");
    frame.render_widget(Line::from(keys), areas[4]);
}

#[cfg(test)]
mod tests {
    use super::super::view::tests::{names, samples};
    use super::super::view::{Sort, View};
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn lines(tab: Tab, width: u16, height: u16) -> Vec<String> {
        let (before, now) = samples();
        let view = View::new(&before, &now, Sort::Rate, &names);
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, &view, tab, "/mnt")).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
        (0..height).map(line).collect()
    }

    #[test]
    fn each_table_has_its_screen() {
        let operations = lines(Tab::Operations, 100, 12);
        assert_eq!(operations[0], "braidfs /mnt   operations    domains    processes    tenants");
        assert!(operations[1].starts_with("1003 requests/s"), "{operations:?}");
        assert_eq!(operations[4], "operation  per s  errors     p50     p90     p99   p99.9  of time");
        assert_eq!(operations[5], "GETATTR     1000     2.0  1.3 µs  1.3 µs  1.3 µs  590 µs     25 %");
        assert!(operations[11].starts_with("q end"));
        assert!(lines(Tab::Domains, 100, 12)[6].ends_with("FAILED"));
        assert!(lines(Tab::Processes, 100, 12)[6].starts_with("kernel"));
        assert!(lines(Tab::Tenants, 100, 12)[5].starts_with("mail"));
    }

    #[test]
    fn a_small_screen_is_no_error() {
        for (width, height) in [(1, 1), (3, 2), (20, 4), (40, 6)] {
            for tab in [Tab::Operations, Tab::Domains, Tab::Processes, Tab::Tenants] {
                assert_eq!(lines(tab, width, height).len(), usize::from(height));
            }
        }
    }
}
