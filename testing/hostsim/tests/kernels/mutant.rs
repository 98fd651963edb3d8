//! Each planted fault is caught by the check of its kernel, in one of the thread orders at least. A
//! check that could not fail would prove nothing.

use hostsim::row_layout::RowLayout;
use hostsim::steps::Finish;
use hostsim::{HostQueue, Mutant};
use powerinfer_ops::{LowBitFormat, WeightFormat};

use crate::device::{ORDERS, Tokens, Weights};
use crate::{attention, estimate, list, many, mlp, norm, product, stream, sum};

/// What the check of a mutant's kernel says with these kernels.
fn check(mutant: Mutant, queue: &HostQueue, format: WeightFormat) -> Result<(), String> {
    let d = if format.block_len() == 1 { 259 } else { 544 };
    match mutant {
        Mutant::None => Ok(()),
        Mutant::MatvecGuard | Mutant::MatvecReduction => {
            let weights = Weights::random(format, 5, d, 1);
            let case = product::Case { weights, x: Tokens::random(2, d, 2), ids: None };
            let (expected, bounds) = case.expected();
            near(&case.run(queue, Finish::NOTHING)?, &expected, &bounds)
        }
        Mutant::PicksNan | Mutant::PicksThreshold => {
            mlp::check(queue, WeightFormat::F32, [33, 5, 31, 2], 0.5)
        }
        Mutant::AxpyGuard | Mutant::AxpyPart => {
            let weights = Weights::random(format, 130, d, 1);
            let scales = sum::scales(130, 1, 3);
            let (expected, bounds) = sum::expected(&weights, &scales, 1);
            near(&sum::sums(queue, &weights, (&scales, 1), true, None)?, &expected, &bounds)
        }
        Mutant::CompactBarrier | Mutant::CompactGuard => {
            list::check(queue, (&list::values(2, 1000, 0.3, 4), 2, 1000), None)
        }
        Mutant::CompactTally => {
            list::check(queue, (&list::values(17, 100, 0.05, 4), 17, 100), None)
        }
        Mutant::QuantizeBarrier | Mutant::QuantizeReduction => {
            let x = Tokens::random(1, 300, 6);
            let right = product::quantized(&HostQueue::new(0), &x)?;
            let found = product::quantized(queue, &x)?;
            (found == right).then_some(()).ok_or_else(|| "another rounding".to_owned())
        }
        Mutant::EstimateOrder => {
            estimate::Case::edge(LowBitFormat::Bits2, 200, 4544).check(queue, 0.0)
        }
        Mutant::NormBarrier => norm::check_norm(queue, true, 500),
        Mutant::ResidualGuard => stream::check_sums(queue, 2, 300),
        Mutant::TokenNormsBarrier => stream::check_norms(queue, 700),
        Mutant::RotaryGuard => norm::check_rotary(queue, 3, 10),
        Mutant::AttentionBarrier | Mutant::AttentionReduction => {
            attention::Case::plain(300, 1).check(queue)
        }
        Mutant::AttentionFuture => attention::Case::plain(300, 40).check(queue),
        Mutant::TiledMatvecBarrier | Mutant::TiledMatvecGuard | Mutant::TiledMatvecOrder => {
            many::check_products(queue, format, [45, 4 * d, 17], Some(vec![0, 3, 9]))
        }
        Mutant::TiledAxpyBarrier | Mutant::TiledAxpyGuard | Mutant::TiledAxpyGroup => {
            many::check_sums(queue, format, [300, d, 17], true)
        }
    }
}

fn near(found: &[f32], expected: &[f32], bounds: &[f32]) -> Result<(), String> {
    let is_near = |i: usize| (found[i] - expected[i]).abs() <= bounds[i];
    let far = (0..found.len()).filter(|&i| !is_near(i));
    match far.count() {
        0 => Ok(()),
        n => Err(format!("{n} of {} values are too far off", found.len())),
    }
}

#[test]
fn every_planted_fault_is_caught() {
    for &mutant in &Mutant::ALL[1..] {
        // the checks of which kernels have a format
        let of_formats =
            ["Matvec", "Axpy"].iter().any(|kernel| format!("{mutant:?}").contains(kernel));
        let formats = if of_formats { &RowLayout::FORMATS[..] } else { &RowLayout::FORMATS[..1] };
        for &format in formats {
            check(mutant, &HostQueue::new(0), format).unwrap();
            let queues = ORDERS.map(|order| HostQueue::of_mutant(mutant, order));
            let mut caught = queues.iter().filter(|queue| check(mutant, queue, format).is_err());
            assert!(caught.next().is_some(), "{mutant:?} passes in {format}");
        }
    }
}
