use std::num::NonZeroUsize;

use testing::{Seeded, assert_same_bits};

use super::*;
use crate::activation::Activation;
use crate::ffn::{NeuronScores, ffn_into};
use crate::format::WeightFormat;
use crate::format::low_bit::LowBitFormat;
use crate::gate_estimate::GateEstimate;
use crate::mask::NeuronIds;
use crate::threads::ThreadPool;
use crate::workspace::Workspace;

#[test]
fn stretches_are_all_neurons_in_whole_chunks() {
    for n_neurons in [0, 1, 255, 256, 257, 1024, 1025, 5632, 11008, 28672] {
        for n_threads in [1, 2, 3, 16, 200] {
            let mut next = 0;
            for rows in stretches(n_neurons, n_threads) {
                assert_eq!(rows.start, next);
                assert!(!rows.is_empty() && rows.len() <= MOST_CHUNKS * CHUNK_ROWS);
                assert!(rows.len() % CHUNK_ROWS == 0 || rows.end == n_neurons);
                next = rows.end;
            }
            assert_eq!(next, n_neurons);
        }
    }
}

#[test]
fn a_network_of_many_chunks_has_the_same_bits_however_it_is_cut() {
    let (n, d) = (11 * CHUNK_ROWS + 77, 512);
    for format in [WeightFormat::F16, WeightFormat::Q8_0, WeightFormat::Q4_0] {
        let matrix =
            |seed| NeuronMatrix::from_f32(format, n, d, &Seeded::new(seed).normal(n * d)).unwrap();
        let relu = Activation::Relu;
        let weights = FfnWeights::new(matrix(1), Some(matrix(2)), matrix(3), relu).unwrap();
        let x = Seeded::new(4).normal(d);
        let run = |n_threads: usize, neurons: Neurons<'_>| {
            let pool = ThreadPool::new(NonZeroUsize::new(n_threads)).unwrap();
            let (mut y, mut workspace) = (vec![0.0; d], Workspace::default());
            let run = || ffn_into(&weights, neurons, &x, &mut workspace, &mut y);
            let counts = pool.install(run).unwrap();
            (y, counts)
        };
        // one chunk without a neuron, one with all, and some of each of the others
        let listed = |id: &u32| match *id as usize / CHUNK_ROWS {
            2 => false,
            5 => true,
            _ => id % 7 < 2,
        };
        let picks = [NeuronIds::from_sorted((0..n as u32).filter(listed).collect()).unwrap()];
        let all = [NeuronIds::all(n)];
        let rows = NeuronMatrix::from_f32(format, n, 128, &Seeded::new(5).normal(n * 128)).unwrap();
        let hidden = Seeded::new(6).normal(128);
        let scored = Neurons::Scored(NeuronScores { rows: &rows, hidden: &hidden, threshold: 4.0 });
        let copy = LowBitFormat::Bits2;
        let copy = GateEstimate::new(copy, &weights.gate, None, relu).unwrap();
        let predicted = [scored, Neurons::Estimated(&copy, 0.5)].map(|by| (by, run(1, by)));
        let whole = run(1, Neurons::All);
        let of_picks = run(1, Neurons::FiringOf(&picks));
        for n_threads in [1, 2, 3, 4, 7] {
            for neurons in [Neurons::All, Neurons::Firing, Neurons::FiringOf(&all)] {
                let (y, counts) = run(n_threads, neurons);
                assert_same_bits(&y, &whole.0, format!("{format} {n_threads}"));
                assert_eq!(counts.fired, whole.1.fired);
            }
            let (y, counts) = run(n_threads, Neurons::FiringOf(&picks));
            assert_same_bits(&y, &of_picks.0, format!("{format} {n_threads} picks"));
            assert_eq!(counts.fired, of_picks.1.fired);
            assert_eq!(counts.picked, picks[0].len() as u64);
            for (predictor, expected) in &predicted {
                let (y, counts) = run(n_threads, *predictor);
                assert_same_bits(&y, &expected.0, format!("{format} {n_threads} predicted"));
                assert_eq!((counts.picked, counts.fired), (expected.1.picked, expected.1.fired));
                assert!(counts.fired > 0 && counts.picked < n as u64, "{counts:?}");
            }
        }
    }
}
