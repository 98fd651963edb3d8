//! The laws that every architecture keeps, over every fixture that belongs to one.
//!
//! A new architecture needs no line here: its fixtures are found by the `model_type` that it is
//! registered under.
//!
//! 1. The logits are the reference's, and so are the greedy ids and the counts of fired neurons.
//! 2. Any cut of the tokens into prefill and decode gives the same bits.
//! 3. Running the neurons that fire gives the same bits as running all.
//! 4. Any number of threads gives the same bits.
//!
//! That any split of the neurons into shards gives the same logits is tested where shards can be
//! chosen: beside the layer.

#[path = "support/run.rs"]
mod run;

use powerinfer_core::{CausalLm, Error, Sparsity, Step, WantedLogits};
use powerinfer_models::{LoadOptions, load, supported_model_types};
use powerinfer_ops::WeightFormat;
use powerinfer_ops::attention::KvDtype;
use run::{
    Run, forward, greedy, load_fixture, load_fixture_as, load_with_f16_cache, modes, pool,
    random_tokens,
};
use testing::{Fixture, Seeded, assert_close, assert_same_bits};

fn fixtures() -> impl Iterator<Item = Fixture> {
    let model_types = supported_model_types();
    Fixture::all("").into_iter().filter(move |f| model_types.contains(&f.model_type().as_str()))
}

#[test]
fn every_model_type_has_a_fixture() {
    let found: Vec<String> = fixtures().map(|fixture| fixture.model_type()).collect();
    for model_type in supported_model_types() {
        assert!(found.iter().any(|found| found == model_type), "{model_type}");
    }
}

/// As many tokens as the model's context takes, 300 at most: several pages of the cache.
fn long_tokens(model: &dyn CausalLm, seed: u64) -> Vec<u32> {
    random_tokens(model, model.info().max_context.min(300), seed)
}

#[test]
fn logits_are_the_reference_s() {
    for fixture in fixtures() {
        let golden = fixture.golden();
        for &sparsity in modes(&fixture) {
            // Types that f32 holds exactly: as they are stored, and widened while loading.
            for dtype in [None, Some(WeightFormat::F32)] {
                let model = load_fixture_as(&fixture, sparsity, dtype);
                for (k, prompt) in golden.prompts.iter().enumerate() {
                    let what = format!("{} p{k}, {sparsity}, {dtype:?}", fixture.name);
                    let ids = &prompt.input_ids;
                    let run = run::run(&*model, ids, &[ids.len()]);
                    for (i, expected) in prompt.positions.iter().zip(prompt.logits_at.rows()) {
                        let what = format!("{what}, position {i}");
                        assert_close(run.row(&*model, *i), expected, golden.logit_bound(), what);
                    }
                    let last = run.row(&*model, ids.len() - 1);
                    assert_close(last, &prompt.logits_last, golden.logit_bound(), what);
                }
            }
        }
    }
}

#[test]
fn greedy_ids_are_the_reference_s() {
    for fixture in fixtures() {
        for &sparsity in modes(&fixture) {
            let model = load_fixture(&fixture, sparsity);
            for (k, prompt) in fixture.golden().prompts.iter().enumerate() {
                let (ids, _) = greedy(&*model, &prompt.input_ids, prompt.greedy_ids.len());
                assert_eq!(ids, prompt.greedy_ids, "{} p{k}, {sparsity}", fixture.name);
            }
        }
    }
}

#[test]
fn fired_neurons_are_counted_as_the_reference_counts_them() {
    for fixture in fixtures() {
        for &sparsity in modes(&fixture) {
            let model = load_fixture(&fixture, sparsity);
            for (k, prompt) in fixture.golden().prompts.iter().enumerate() {
                let what = format!("{} p{k}, {sparsity}", fixture.name);
                let ids = &prompt.input_ids;
                let prefill = run::run(&*model, ids, &[ids.len()]);
                let expected = prompt.active_per_layer();
                assert_counts(&prefill, &expected, &prompt.borderline, &format!("{what}, prompt"));

                let (_, decode) = greedy(&*model, ids, prompt.greedy_ids.len());
                let expected = prompt.greedy_active_per_layer();
                // How many are borderline is stored for the prompt alone; a continuation as long
                // as that is allowed one more a layer.
                let allowed: Vec<i32> = prompt.borderline.iter().map(|n| n + 1).collect();
                assert_counts(&decode, &expected, &allowed, &format!("{what}, continuation"));
            }
        }
    }
}

#[track_caller]
fn assert_counts(run: &Run, expected: &[u64], allowed: &[i32], what: &str) {
    let found = &run.stats.fired_per_layer;
    assert_eq!(found.len(), expected.len(), "{what}: layers");
    for (layer, allowed) in allowed.iter().enumerate() {
        let distance = found[layer].abs_diff(expected[layer]);
        assert!(
            distance <= u64::from(allowed.unsigned_abs()),
            "{what}, layer {layer}: found {}, expected {} give or take {allowed}",
            found[layer],
            expected[layer],
        );
    }
}

#[test]
fn rows_read_are_all_in_dense_mode_and_the_fired_ones_in_exact_mode() {
    for fixture in fixtures() {
        for &sparsity in modes(&fixture) {
            let model = load_fixture(&fixture, sparsity);
            let tokens = random_tokens(&*model, 20, 1);
            let stats = run::run(&*model, &tokens, &[13, 1, 6]).stats;
            let info = model.info();
            let what = format!("{}, {sparsity}", fixture.name);
            assert_eq!(stats.n_tokens, 20, "{what}");
            assert_eq!(
                stats.neurons_per_layer,
                vec![20 * info.d_ff as u64; info.n_layers],
                "{what}"
            );
            match sparsity {
                Sparsity::Dense => {
                    assert_eq!(stats.rows_per_layer, stats.neurons_per_layer, "{what}")
                }
                // under dReLU about half of the neurons that the gate lets through have up at zero
                _ if fixture.name.contains("drelu") => {
                    let layers = stats.rows_per_layer.iter().zip(&stats.fired_per_layer);
                    for (&rows, &fired) in layers {
                        assert!(rows > fired / 4 && rows < fired * 3 / 4, "{what}: {rows} {fired}");
                    }
                }
                _ => assert_eq!(stats.rows_per_layer, stats.fired_per_layer, "{what}"),
            }
        }
    }
}

#[test]
fn any_cut_of_the_tokens_gives_the_same_bits() {
    for (seed, fixture) in fixtures().enumerate() {
        let mut data = Seeded::new(seed as u64);
        for &sparsity in modes(&fixture) {
            let model = load_fixture(&fixture, sparsity);
            let tokens = long_tokens(&*model, seed as u64);
            let n = tokens.len();
            let whole = run::run(&*model, &tokens, &[n]);
            let mut cuts = vec![vec![1; n], vec![n - 1, 1], vec![1, n - 1]];
            cuts.extend([3, 17, 70, n].map(|largest| data.pieces(n, largest)));
            for cut in cuts {
                let pieces = run::run(&*model, &tokens, &cut);
                let what = format!("{}, {sparsity}, pieces of {cut:?}", fixture.name);
                assert_same_bits(&pieces.logits, &whole.logits, &what);
                assert_eq!(pieces.stats.fired_per_layer, whole.stats.fired_per_layer, "{what}");
            }
        }
    }
}

#[test]
fn exact_gives_the_same_bits_as_dense() {
    for fixture in fixtures() {
        let mut dtypes = vec![None, Some(WeightFormat::F32)];
        if fixture.name == Fixture::demo().name {
            // the micro models are narrower than a block
            dtypes.extend([Some(WeightFormat::Q8_0), Some(WeightFormat::Q4_0)]);
        }
        for dtype in dtypes {
            let [dense, exact] = [Sparsity::Dense, Sparsity::Auto]
                .map(|mode| load_fixture_as(&fixture, mode, dtype));
            let tokens = long_tokens(&*dense, 2);
            for pieces in [vec![tokens.len()], vec![1; tokens.len()]] {
                let expected = run::run(&*dense, &tokens, &pieces);
                let found = run::run(&*exact, &tokens, &pieces);
                assert_same_bits(&found.logits, &expected.logits, &fixture.name);
                assert_eq!(found.stats.fired_per_layer, expected.stats.fired_per_layer);
            }
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for fixture in fixtures() {
        for &sparsity in modes(&fixture) {
            let model = load_fixture(&fixture, sparsity);
            let tokens = long_tokens(&*model, 3);
            let (prompt, next) = tokens.split_at(tokens.len() - 1);
            let of = |n_threads: usize| {
                let pool = pool(n_threads);
                let mut cache = model.new_cache();
                let mut step = Step { wanted: WantedLogits::All, ..Step::default() };
                let mut forward = |tokens: &[u32]| {
                    let done = pool.install(|| model.forward(tokens, &mut cache, &mut step));
                    done.expect("a forward pass");
                    step.logits.clone()
                };
                (forward(prompt), forward(next))
            };
            let (prefill, decode) = of(1);
            for n_threads in [2, 3, 4] {
                let what = format!("{}, {sparsity}, {n_threads} threads", fixture.name);
                let (found_prefill, found_decode) = of(n_threads);
                assert_same_bits(&found_prefill, &prefill, format!("{what}, prefill"));
                assert_same_bits(&found_decode, &decode, format!("{what}, decode"));
            }
        }
    }
}

#[test]
fn running_past_the_context_is_an_error_and_leaves_the_cache_usable() {
    for fixture in fixtures() {
        for &sparsity in modes(&fixture) {
            let model = load_fixture(&fixture, sparsity);
            let max = model.info().max_context;
            let tokens = random_tokens(&*model, max, 4);
            let (most, rest) = tokens.split_at(max - 3);
            let what = format!("{}, {sparsity}", fixture.name);

            let mut cache = model.new_cache();
            forward(&*model, &mut cache, most).expect("a prompt that fits");
            for requested in [4, max] {
                let error = forward(&*model, &mut cache, &tokens[..requested]).expect_err(&what);
                let Error::ContextExceeded { have, requested: asked, max: limit } = error else {
                    panic!("{what}: {error}");
                };
                assert_eq!((have, asked, limit), (most.len(), requested, max), "{what}");
                assert_eq!(cache.len(), most.len(), "{what}: the cache is as it was");
            }

            let found =
                forward(&*model, &mut cache, rest).expect("the rest fits to the last position");
            let fresh = run::run(&*model, &tokens, &[most.len(), rest.len()]);
            let expected = &fresh.logits[fresh.logits.len() - found.logits.len()..];
            assert_same_bits(&found.logits, expected, &what);
            assert!(forward(&*model, &mut cache, &tokens[..1]).is_err(), "{what}: full");
        }
    }
}

#[test]
fn a_prompt_longer_than_the_context_is_an_error_before_any_work() {
    for fixture in fixtures() {
        let model = load_fixture(&fixture, Sparsity::Auto);
        let mut cache = model.new_cache();
        let tokens = random_tokens(&*model, model.info().max_context + 1, 5);
        let error = forward(&*model, &mut cache, &tokens).expect_err("it does not fit");
        assert!(matches!(error, Error::ContextExceeded { have: 0, .. }), "{error}");
        assert!(cache.is_empty());
    }
}

#[test]
fn a_token_out_of_range_is_an_error_and_leaves_the_cache_usable() {
    for fixture in fixtures() {
        let model = load_fixture(&fixture, Sparsity::Auto);
        let vocab_size = model.info().vocab_size;
        let mut cache = model.new_cache();
        forward(&*model, &mut cache, &[1, 2]).expect("two tokens");
        for token in [vocab_size as u32, u32::MAX] {
            let error = forward(&*model, &mut cache, &[1, token]).expect_err("no such token");
            assert!(matches!(error, Error::TokenOutOfRange { .. }), "{error}");
            assert_eq!(cache.len(), 2, "{}", fixture.name);
        }
        let found = forward(&*model, &mut cache, &[3]).expect("a third token");
        let expected = run::run(&*model, &[1, 2, 3], &[2, 1]);
        assert_same_bits(&found.logits, expected.row(&*model, 2), &fixture.name);
    }
}

#[test]
fn wanted_logits_are_rows_of_all_of_them() {
    for fixture in fixtures() {
        let model = load_fixture(&fixture, Sparsity::Auto);
        let tokens = random_tokens(&*model, 10, 6);
        let all = run::run(&*model, &tokens, &[10]);
        let mut step = Step::default();
        // One step throughout: nothing of an earlier pass is left in its buffers.
        for (wanted, expected) in [
            (WantedLogits::All, &all.logits[..]),
            (WantedLogits::Last, all.row(&*model, 9)),
            (WantedLogits::None, &[]),
            (WantedLogits::Last, all.row(&*model, 9)),
        ] {
            step.wanted = wanted;
            let mut cache = model.new_cache();
            pool(2).install(|| model.forward(&tokens, &mut cache, &mut step)).expect("a pass");
            assert_same_bits(&step.logits, expected, &fixture.name);
        }
    }
}

#[test]
fn a_truncated_cache_goes_on_as_if_the_rest_had_never_been() {
    for fixture in fixtures() {
        let model = load_fixture(&fixture, Sparsity::Auto);
        let tokens = random_tokens(&*model, 90, 7);
        let others = random_tokens(&*model, 90, 8);
        let expected = run::run(&*model, &tokens, &[90]);
        for keep in [0, 1, 63, 64, 70] {
            let mut cache = model.new_cache();
            let first = [&tokens[..keep], &others[keep..]].concat();
            forward(&*model, &mut cache, &first).expect("a forward pass");
            cache.truncate(keep);
            assert_eq!(cache.len(), keep);
            let found = forward(&*model, &mut cache, &tokens[keep..]).expect("a forward pass");
            let from = keep * model.info().vocab_size;
            assert_same_bits(&found.logits, &expected.logits[from..], &fixture.name);
        }
    }
}

#[test]
fn a_cache_in_f16_keeps_logits_and_every_law_of_bits() {
    for fixture in fixtures() {
        let golden = fixture.golden();
        let bound = 0.01 * golden.logit_std as f32;
        let model = load_with_f16_cache(&fixture, Sparsity::Auto);
        assert_eq!(model.info().kv.dtype, KvDtype::F16);
        // rounding a key may lift a neuron over a threshold, and then it jumps
        let prompts = golden.prompts.iter().filter(|_| !fixture.name.contains("fatrelu"));
        for (k, prompt) in prompts.enumerate() {
            let ids = &prompt.input_ids;
            let run = run::run(&*model, ids, &[ids.len()]);
            let last = run.row(&*model, ids.len() - 1);
            assert_close(last, &prompt.logits_last, bound, format!("{} p{k}", fixture.name));
        }
        let dense = load_with_f16_cache(&fixture, Sparsity::Dense);
        let tokens = long_tokens(&*model, 9);
        let whole = run::run(&*dense, &tokens, &[tokens.len()]);
        for largest in [1, 70] {
            let pieces = Seeded::new(9).pieces(tokens.len(), largest);
            let found = run::run(&*model, &tokens, &pieces);
            assert_same_bits(&found.logits, &whole.logits, &fixture.name);
        }
        let mut cache = model.new_cache();
        let mut step = Step { wanted: WantedLogits::All, ..Step::default() };
        pool(3).install(|| model.forward(&tokens, &mut cache, &mut step)).expect("a forward pass");
        assert_same_bits(&step.logits, &whole.logits, &fixture.name);
    }
}

#[test]
fn half_precision_weights_keep_logits_and_choices() {
    for fixture in fixtures() {
        let golden = fixture.golden();
        // rounding a weight may lift a neuron over a threshold, and then it jumps
        if fixture.name.contains("fatrelu") {
            continue;
        }
        let bound = 0.01 * golden.logit_std as f32;
        let model = load_fixture_as(&fixture, Sparsity::Auto, Some(WeightFormat::F16));
        for (k, prompt) in golden.prompts.iter().enumerate() {
            let what = format!("{} p{k}", fixture.name);
            let (text, n) = (&prompt.input_ids, prompt.input_ids.len());
            let fed = [&text[..], &prompt.greedy_ids[..prompt.greedy_ids.len() - 1]].concat();
            let run = run::run(&*model, &fed, &[fed.len()]);
            assert_close(run.row(&*model, n - 1), &prompt.logits_last, bound, &what);
            for (step, (&id, &margin)) in
                prompt.greedy_ids.iter().zip(&prompt.greedy_margin).enumerate()
            {
                let row = run.row(&*model, n - 1 + step);
                let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let kept = row[id as usize] == top;
                assert!(kept || margin <= 2.0 * bound, "{what}, step {step}: margin {margin}");
            }
        }
    }
}

#[test]
fn what_is_not_sparse_says_so_and_runs_densely() {
    for name in ["mistral-silu", "RefinedWeb-40b-gelu"] {
        let fixture = Fixture::micro(name);
        let model = load_fixture(&fixture, Sparsity::Auto);
        assert_eq!(model.info().sparsity, Sparsity::Dense, "{name}");
        let notes = model.info().notes.join("\n");
        assert!(notes.contains("not sparse"), "{name}: {notes}");
        let options = LoadOptions::default().with_sparsity(Sparsity::Exact);
        let error = load(&fixture.model_dir, &options).unwrap_err();
        assert!(matches!(error, powerinfer_models::Error::NotSparse { .. }), "{name}: {error}");
    }
}
