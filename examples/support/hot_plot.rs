//! A plot of a profile: which share of the activations the hottest neurons make, a line a layer.

use std::fmt::Write;

use powerinfer::core::ActivationProfile;

use super::svg::{begin, curve, line, text, upright};

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 520.0;
/// The rectangle that the lines lie in: left, top, right, bottom.
const FRAME: [f64; 4] = [80.0, 60.0, 560.0, 440.0];
/// Points of a line.
const POINTS: usize = 100;
/// Lines that get an entry in the legend; of more layers the middle ones go without.
const LEGEND: usize = 16;

/// The plot as the text of an SVG file.
pub(crate) fn hot_plot(profile: &ActivationProfile) -> String {
    let model = profile.model();
    let mut svg = begin(WIDTH, HEIGHT);
    let title = format!(
        "{:.0} % of the neurons make 80 % of the activations",
        100.0 * profile.hot_share_of_model(0.8)
    );
    text(&mut svg, (FRAME[0], 28.0), "start", 18, &title);
    let counted = match profile.n_tokens() {
        0 => format!("{} layers of {} neurons", model.n_layers, model.d_ff),
        n => format!("{} layers of {} neurons over {n} tokens", model.n_layers, model.d_ff),
    };
    text(&mut svg, (FRAME[0], 48.0), "start", 13, &counted);
    axes(&mut svg);
    for layer in 0..model.n_layers {
        let colour = colour(layer, model.n_layers);
        let shares = profile.hot_curve(layer, POINTS).into_iter().enumerate();
        let points = shares.map(|(i, share)| place(i as f64 / POINTS as f64, share));
        let style = format!(r#"stroke="{colour}" stroke-width="2""#);
        curve(&mut svg, points, &style, &format!("layer {layer}"));
    }
    legend(&mut svg, profile);
    svg.push_str("</svg>\n");
    svg
}

/// Where a point of the unit square lies on the page.
fn place(x: f64, y: f64) -> (f64, f64) {
    let [left, top, right, bottom] = FRAME;
    (left + x * (right - left), bottom - y * (bottom - top))
}

fn axes(svg: &mut String) {
    for step in 0..=5 {
        let share = f64::from(step) / 5.0;
        let label = format!("{} %", step * 20);
        let ((x, bottom), (_, top)) = (place(share, 0.0), place(share, 1.0));
        line(svg, (x, bottom), (x, top));
        text(svg, (x, bottom + 20.0), "middle", 13, &label);
        let ((left, y), (right, _)) = (place(0.0, share), place(1.0, share));
        line(svg, (left, y), (right, y));
        text(svg, (left - 8.0, y + 5.0), "end", 13, &label);
    }
    let (x, bottom) = place(0.5, 0.0);
    text(svg, (x, bottom + 46.0), "middle", 14, "neurons, those that fire most often first");
    let (left, y) = place(0.0, 0.5);
    upright(svg, (left - 56.0, y), "activations that they make");
    // what neurons that all fire alike would give
    let ((x1, y1), (x2, y2)) = (place(0.0, 0.0), place(1.0, 1.0));
    let _ = writeln!(
        svg,
        r##"<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#999" stroke-dasharray="5 4"/>"##
    );
}

fn legend(svg: &mut String, profile: &ActivationProfile) {
    let n_layers = profile.model().n_layers;
    let shown = n_layers.min(LEGEND);
    for entry in 0..shown {
        // the first, the last, and evenly between
        let layer = if shown < 2 { 0 } else { entry * (n_layers - 1) / (shown - 1) };
        let y = FRAME[1] + 10.0 + 23.0 * entry as f64;
        let x = FRAME[2] + 20.0;
        let colour = colour(layer, n_layers);
        let _ = writeln!(
            svg,
            r#"<line x1="{x}" y1="{y}" x2="{}" y2="{y}" stroke="{colour}" stroke-width="4"/>"#,
            x + 24.0
        );
        let label = match profile.n_tokens() {
            0 => format!("layer {layer}"),
            _ => format!("layer {layer}, {:.1} % fire", 100.0 * profile.density(layer)),
        };
        text(svg, (x + 32.0, y + 5.0), "start", 13, &label);
    }
}

/// From blue for the first layer to red for the last.
fn colour(layer: usize, n_layers: usize) -> String {
    let share = layer as f64 / (n_layers.max(2) - 1) as f64;
    format!("hsl({:.0} 75% 42%)", 225.0 * (1.0 - share))
}
