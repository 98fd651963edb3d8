//! A plot of plans: hit rate and predicted speed against the budget.

use std::fmt::Write;

use super::svg::{begin, curve, line, text, upright};

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 520.0;
/// The rectangle that the lines lie in: left, top, right, bottom.
const FRAME: [f64; 4] = [80.0, 76.0, 560.0, 440.0];

const HIT_RATE: &str = "hsl(225 75% 42%)";
const HOT_COLD: &str = "hsl(10 75% 45%)";
const LAYER_SPLIT: &str = "hsl(35 85% 42%)";
const DENSE: &str = "#777";

/// What comes of a budget.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BudgetPoint {
    pub(crate) budget_bytes: u64,
    pub(crate) hit_rate: f64,
    pub(crate) tokens_per_second: f64,
    pub(crate) layer_split_tokens_per_second: f64,
}

/// The plot as the text of an SVG file; `points` with rising budgets, `dense` the speed of the host
/// alone, `chosen` the budget that was asked for.
pub(crate) fn budget_plot(
    title: &str,
    subtitle: &str,
    points: &[BudgetPoint],
    dense: f64,
    chosen: u64,
) -> String {
    let mut svg = begin(WIDTH, HEIGHT);
    text(&mut svg, (FRAME[0], 28.0), "start", 18, title);
    text(&mut svg, (FRAME[0], 50.0), "start", 13, subtitle);
    let most_bytes = points.last().map_or(1, |point| point.budget_bytes).max(1) as f64;
    let speeds = points.iter().flat_map(|p| [p.tokens_per_second, p.layer_split_tokens_per_second]);
    let top = round_up(speeds.fold(dense, f64::max));
    axes(&mut svg, most_bytes, top);
    let x = |bytes: u64| bytes as f64 / most_bytes;
    let (from, to) = (place(x(chosen).min(1.0), 0.0), place(x(chosen).min(1.0), 1.0));
    let _ = writeln!(
        svg,
        r##"<line x1="{:.1}" y1="{:.1}" x2="{:.1}" y2="{:.1}" stroke="#999" stroke-dasharray="2 4"/>"##,
        from.0, from.1, to.0, to.1
    );
    let heights = |of: &dyn Fn(&BudgetPoint) -> f64| points.iter().map(of).collect::<Vec<f64>>();
    let lines = [
        ("hit rate", HIT_RATE, heights(&|p| p.hit_rate)),
        ("hot and cold, tokens/s", HOT_COLD, heights(&|p| p.tokens_per_second / top)),
        (
            "split by layers, tokens/s",
            LAYER_SPLIT,
            heights(&|p| p.layer_split_tokens_per_second / top),
        ),
        ("host alone, dense, tokens/s", DENSE, heights(&|_| dense / top)),
    ];
    for (index, (name, colour, heights)) in lines.into_iter().enumerate() {
        let at = points.iter().zip(heights).map(|(p, height)| place(x(p.budget_bytes), height));
        // what a plan gives is drawn through, what it is compared with in dashes
        let dashes = if index < 2 { "" } else { r#" stroke-dasharray="7 3""# };
        curve(&mut svg, at, &format!(r#"stroke="{colour}" stroke-width="2.5"{dashes}"#), name);
        let (left, y) = (FRAME[2] + 84.0, FRAME[1] + 14.0 + 26.0 * index as f64);
        let _ = writeln!(
            svg,
            r#"<line x1="{left}" y1="{y}" x2="{}" y2="{y}" stroke="{colour}" stroke-width="3"{dashes}/>"#,
            left + 28.0
        );
        text(&mut svg, (left + 36.0, y + 5.0), "start", 12, name);
    }
    svg.push_str("</svg>\n");
    svg
}

fn axes(svg: &mut String, most_bytes: f64, top: f64) {
    let (unit, name) = if most_bytes >= f64::from(1 << 30) {
        (f64::from(1 << 30), "GiB")
    } else {
        (f64::from(1 << 20), "MiB")
    };
    for step in 0..=5 {
        let share = f64::from(step) / 5.0;
        let ((x, bottom), (_, above)) = (place(share, 0.0), place(share, 1.0));
        line(svg, (x, bottom), (x, above));
        text(svg, (x, bottom + 20.0), "middle", 13, &format!("{:.1}", share * most_bytes / unit));
        let ((left, y), (right, _)) = (place(0.0, share), place(1.0, share));
        line(svg, (left, y), (right, y));
        text(svg, (left - 8.0, y + 5.0), "end", 13, &format!("{} %", step * 20));
        text(svg, (right + 8.0, y + 5.0), "start", 13, &figure(share * top));
    }
    let (x, bottom) = place(0.5, 0.0);
    text(svg, (x, bottom + 46.0), "middle", 14, &format!("budget on the fast device, {name}"));
    let ((left, y), (right, _)) = (place(0.0, 0.5), place(1.0, 0.5));
    upright(svg, (left - 58.0, y), "activations that hot neurons make");
    upright(svg, (right + 68.0, y), "predicted tokens per second");
}

/// Where a point of the unit square lies on the page.
fn place(x: f64, y: f64) -> (f64, f64) {
    let [left, top, right, bottom] = FRAME;
    (left + x * (right - left), bottom - y * (bottom - top))
}

/// A number of one digit or of half ones that is not below.
fn round_up(number: f64) -> f64 {
    let power = 10f64.powf(number.max(1e-9).log10().floor());
    let digits = [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0];
    digits.map(|digit| digit * power).into_iter().find(|&top| top >= number).unwrap_or(number)
}

fn figure(number: f64) -> String {
    if number >= 100.0 || number == 0.0 { format!("{number:.0}") } else { format!("{number:.1}") }
}
