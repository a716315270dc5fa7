//! Small pieces of SVG. Colours are CSS variables of the page, so that light and dark are a matter of style.

use std::fmt::Write;

/// An element that grows.
#[derive(Debug)]
pub struct Svg {
    body: String,
    width: f64,
    height: f64,
    label: String,
}

/// Where a text is held.
#[derive(Debug, Clone, Copy)]
pub enum Anchor {
    /// At its start.
    Start,
    /// In its middle.
    Middle,
    /// At its end.
    End,
}

/// Text for HTML.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

impl Svg {
    /// Empty, with a description for those who cannot see it.
    pub fn new(width: f64, height: f64, label: &str) -> Self {
        Self { body: String::new(), width, height, label: escape(label) }
    }

    // writing to a string does not fail
    fn add(&mut self, piece: std::fmt::Arguments<'_>) {
        let _ = self.body.write_fmt(piece);
    }

    /// A line of a class.
    pub fn line(&mut self, (x1, y1): (f64, f64), (x2, y2): (f64, f64), class: &str) {
        self.add(format_args!(r#"<line class="{class}" x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}"/>"#));
    }
    /// A text of a class.
    pub fn text(&mut self, (x, y): (f64, f64), anchor: Anchor, class: &str, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let text = escape(text);
        self.add(format_args!(r#"<text class="{class}" x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{text}</text>"#));
    }
    /// A filled rectangle with a tip.
    pub fn rect(&mut self, (x, y): (f64, f64), (w, h): (f64, f64), fill: &str, tip: &str) {
        let tip = escape(tip);
        self.add(format_args!(
            r#"<rect x="{x:.1}" y="{y:.1}" width="{w:.1}" height="{h:.1}" rx="1.5" fill="{fill}"><title>{tip}</title></rect>"#
        ));
    }
    /// A line through points.
    pub fn polyline(&mut self, points: &[(f64, f64)], stroke: &str) {
        if points.len() < 2 {
            return;
        }
        let list: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        self.add(format_args!(r#"<polyline class="curve" stroke="{stroke}" points="{}"/>"#, list.join(" ")));
    }
    /// A filled area of a class within points, with a tip.
    pub fn area(&mut self, points: &[(f64, f64)], class: &str, tip: &str) {
        let list: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let (list, tip) = (list.join(" "), escape(tip));
        self.add(format_args!(r#"<polygon class="{class}" points="{list}"><title>{tip}</title></polygon>"#));
    }
    /// One of five shapes, with a tip.
    pub fn marker(&mut self, (x, y): (f64, f64), shape: usize, fill: &str, tip: &str) {
        let r = 3.6;
        let tip = escape(tip);
        let shape = match shape % 5 {
            0 => format!(r#"<circle cx="{x:.1}" cy="{y:.1}" r="{r}""#),
            1 => format!(r#"<rect x="{:.1}" y="{:.1}" width="6.4" height="6.4""#, x - 3.2, y - 3.2),
            2 => format!(r#"<path d="M{x:.1} {:.1}l4.2 7.2h-8.4z""#, y - 4.6),
            3 => format!(r#"<path d="M{x:.1} {:.1}l4.6 4.6l-4.6 4.6l-4.6 -4.6z""#, y - 4.6),
            _ => format!(r#"<path d="M{x:.1} {:.1}l4.2 -7.2h-8.4z""#, y + 4.6),
        };
        self.add(format_args!(
            r#"{shape} class="marker" fill="{fill}"><title>{tip}</title></{}>"#,
            match shape {
                ref s if s.starts_with("<circle") => "circle",
                ref s if s.starts_with("<rect") => "rect",
                _ => "path",
            }
        ));
    }
    /// A file of its own, with this style.
    pub fn end_file(self, style: &str) -> String {
        let element = self.end();
        let rest = element.strip_prefix("<svg").unwrap_or(&element);
        match rest.split_once('>') {
            Some((head, body)) => {
                format!(r#"<svg xmlns="http://www.w3.org/2000/svg"{head}><style>{style}</style>{body}"#) + "\n"
            }
            None => element,
        }
    }
    /// The `svg` element as text.
    pub fn end(self) -> String {
        let Self { body, width, height, label } = self;
        format!(
            r#"<svg viewBox="0 0 {width:.0} {height:.0}" width="{width:.0}" height="{height:.0}" role="img" aria-label="{label}">{body}</svg>"#
        )
    }
}

/// Round steps from 0 to at least `max`: about four.
pub fn steps(max: f64) -> Vec<f64> {
    if max <= 0.0 || !max.is_finite() {
        return vec![0.0, 1.0];
    }
    let raw = max / 4.0;
    let power = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0].map(|m| m * power).into_iter().find(|s| *s >= raw * 0.999).unwrap_or(raw);
    let count = (max / step - 1e-9).ceil() as usize;
    (0..=count).map(|i| i as f64 * step).collect()
}

/// A round figure for an axis: `2.5M`, `40k`.
pub fn tick(n: f64) -> String {
    let (n, unit) = match n.abs() {
        a if a >= 1e9 => (n / 1e9, "G"),
        a if a >= 1e6 => (n / 1e6, "M"),
        a if a >= 1e3 => (n / 1e3, "k"),
        _ => (n, ""),
    };
    let text = format!("{n:.2}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    format!("{text}{unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_round_and_reach() {
        assert_eq!(steps(10.0), [0.0, 2.5, 5.0, 7.5, 10.0]);
        assert_eq!(steps(3.9e6), [0.0, 1e6, 2e6, 3e6, 4e6]);
        for max in [0.001, 7.0, 123.0, 9.99e9] {
            let s = steps(max);
            assert!(s.last().is_some_and(|l| *l >= max) && (3..=6).contains(&s.len()), "{max}: {s:?}");
        }
        assert_eq!((tick(2.5e6), tick(40_000.0), tick(0.0)), ("2.5M".into(), "40k".into(), "0".into()));
    }

    #[test]
    fn text_is_escaped() {
        let mut s = Svg::new(1.0, 1.0, "a<b");
        s.text((0.0, 0.0), Anchor::Start, "t", "x & <y>");
        let out = s.end();
        assert!(out.contains("x &amp; &lt;y&gt;") && out.contains("a&lt;b"));
    }
}
