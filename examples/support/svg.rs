//! Lines and texts of plots, which are written as SVG by hand: less than a plotting library asks for.

use std::fmt::Write;

/// A line of the grid.
pub(crate) fn line(svg: &mut String, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
    let _ = writeln!(
        svg,
        r##"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" stroke="#ddd"/>"##
    );
}

/// A text at a point.
pub(crate) fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, size: u32, text: &str) {
    let _ = writeln!(
        svg,
        r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" font-size="{size}">{text}</text>"#
    );
}
