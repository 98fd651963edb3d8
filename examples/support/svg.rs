//! Parts of plots, as text of SVG files: lines and labels are less than a plotting library asks for.

use std::fmt::Write;

/// The beginning of a file of that size, white, in a sans-serif font.
pub(crate) fn begin(width: f64, height: f64) -> String {
    format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-family="sans-serif" font-size="14" fill="#222">
<rect width="100%" height="100%" fill="white"/>
"##
    )
}

/// A thin grey line.
pub(crate) fn line(svg: &mut String, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
    let _ = writeln!(
        svg,
        r##"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" stroke="#ddd"/>"##
    );
}

/// A text as it stands in a file, whatever model or machine it names: XML has no way to say most
/// control characters.
fn escaped(text: &str) -> String {
    text.chars().fold(String::new(), |mut escaped, c| {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '\u{fffe}' | '\u{ffff}' => escaped.extend(c.escape_unicode()),
            c if c.is_control() => escaped.extend(c.escape_default()),
            c => escaped.push(c),
        }
        escaped
    })
}

/// A label.
pub(crate) fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, size: u32, text: &str) {
    let text = escaped(text);
    let _ = writeln!(
        svg,
        r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" font-size="{size}">{text}</text>"#
    );
}

/// A label that reads from bottom to top.
pub(crate) fn upright(svg: &mut String, (x, y): (f64, f64), text: &str) {
    let text = escaped(text);
    let _ = writeln!(
        svg,
        r#"<text x="{x}" y="{y}" text-anchor="middle" transform="rotate(-90 {x} {y})">{text}</text>"#
    );
}

/// A line through points; `style` is its attributes, `title` what shows when it is pointed at.
pub(crate) fn curve(
    svg: &mut String,
    points: impl IntoIterator<Item = (f64, f64)>,
    style: &str,
    title: &str,
) {
    let points: Vec<String> = points.into_iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let _ = writeln!(
        svg,
        r#"<polyline points="{}" fill="none" {style}><title>{}</title></polyline>"#,
        points.join(" "),
        escaped(title)
    );
}
