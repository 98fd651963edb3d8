//! Synthetic models fire as they are asked to, and are what is written of them.

use super::*;
use powerinfer_core::Step;

#[test]
fn observed_density_is_within_a_tenth_of_the_asked_one_in_every_layer() {
    for density in [0.05, 0.1, 0.5, 0.9] {
        let synthetic = Synthetic::new(SyntheticShape::Tiny, density, 3).unwrap();
        let model = synthetic.load(&LoadOptions::default()).unwrap();
        let (mut cache, mut step) = (model.new_cache(), Step::default());
        let tokens: Vec<u32> = (0..200).map(|i| i * 19 % 4096).collect();
        model.forward(&tokens, &mut cache, &mut step).unwrap();
        for (layer, found) in step.stats.density_per_layer().into_iter().enumerate() {
            assert!((found / density - 1.0).abs() < 0.1, "layer {layer}: {found} {density}");
        }
    }
}

#[test]
fn neurons_fire_as_often_as_the_profile_says() {
    for (density, hot_share_80) in [(0.03, 0.17), (0.2, 0.4)] {
        let synthetic = Synthetic::new(SyntheticShape::Tiny, density, 5).unwrap();
        let synthetic = synthetic.with_skew(hot_share_80).unwrap();
        let model = synthetic.load(&LoadOptions::default()).unwrap();
        let tokens: Vec<u32> = (0..2000).map(|i| i * 1021 % 4096).collect();
        let counted = ActivationProfile::new(model.info(), false).unwrap();
        let go_on = |_: &ActivationProfile, _| std::ops::ControlFlow::Continue(());
        let counted = crate::calibrate(&*model, &tokens, 500, counted, go_on).unwrap();
        let profile = synthetic.profile().unwrap();
        profile.check_model(model.info()).unwrap();
        for layer in 0..6 {
            let found = counted.density(layer);
            assert!((found / density - 1.0).abs() < 0.1, "layer {layer}: {found} {density}");
            // the neurons that are said to be hot make what they are said to make
            let n_hot = (1024.0 * hot_share_80) as usize;
            let counts = counted.counts(layer);
            let hot = profile.hottest(layer, n_hot);
            let made: u64 = hot.as_slice().iter().map(|&id| counts[id as usize]).sum();
            let share = made as f64 / counts.iter().sum::<u64>() as f64;
            assert!((share - 0.8).abs() < 0.03, "layer {layer}: {share}");
        }
        // other neurons in each layer
        let hot = |layer| profile.hottest(layer, 100);
        let same = hot(0).restrict(&hot(1)).len();
        assert!(same < 60, "{same} of 100 are hot in both layers");
    }
}

#[test]
fn layers_that_repeat_others_fire_as_their_own_profile_says() {
    let synthetic = Synthetic::new(SyntheticShape::Tiny, 0.1, 5).unwrap();
    let synthetic = synthetic.with_skew(0.3).unwrap();
    let repeated = synthetic.clone().with_distinct_layers(2);
    let read = |source: &Synthetic, name: &str, offset: u64| {
        let mut out = vec![0; 5000];
        source.read(name, offset, &mut out).unwrap();
        out
    };
    let name = |layer: usize, part: &str| format!("model.layers.{layer}.{part}.weight");
    let gate = "mlp.gate_proj";
    // the first layers are what they are without this, at any offset
    for (offset, part) in [(0, gate), (1022, gate), (130, "mlp.up_proj"), (0, "self_attn.q_proj")] {
        let own = read(&synthetic, &name(1, part), offset);
        assert_eq!(read(&repeated, &name(1, part), offset), own, "{offset} {part}");
        // the third has the values of the first, but for a gate's first column
        let (first, third) =
            (read(&repeated, &name(1, part), offset), read(&repeated, &name(3, part), offset));
        let column = |i: usize| (i + offset as usize) % 512 < 2;
        let differ: Vec<usize> = (0..5000).filter(|&i| first[i] != third[i]).collect();
        assert!(differ.iter().all(|&i| column(i)), "{offset} {part}");
        assert_eq!(differ.is_empty(), part != gate);
        let of_third = read(&synthetic, &name(3, part), offset);
        assert!((0..5000).filter(|&i| column(i)).all(|i| third[i] == of_third[i]));
    }
    assert_ne!(read(&repeated, &name(0, gate), 0), read(&repeated, &name(1, gate), 0));
}

#[test]
fn skews_that_cannot_be_are_refused() {
    // a tenth of the neurons cannot make 80 % where half of all fire
    for (density, hot_share_80) in [(0.5, 0.1), (0.1, 0.0), (0.1, 0.9), (0.1, f64::NAN)] {
        let made = Synthetic::new(SyntheticShape::Tiny, density, 1).unwrap();
        let refused = made.with_skew(hot_share_80).unwrap_err();
        assert!(matches!(refused, Error::Skew { .. }), "{density} {hot_share_80}");
    }
}

#[test]
fn what_is_written_is_what_is_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let synthetic = Synthetic::new(SyntheticShape::Tiny, 0.1, 5).unwrap();
    let synthetic = synthetic.with_skew(0.3).unwrap();
    synthetic.write(dir.path(), WeightFormat::F16).unwrap();
    let made = synthetic.load(&LoadOptions::default()).unwrap();
    let read = crate::load(dir.path(), &LoadOptions::default()).unwrap();
    let logits = |model: &dyn CausalLm| {
        let (mut cache, mut step) = (model.new_cache(), Step::default());
        model.forward(&[1, 2, 3], &mut cache, &mut step).unwrap();
        step.logits
    };
    assert_eq!(logits(made.as_ref()), logits(read.as_ref()));
}

#[test]
fn densities_and_names_that_cannot_be_are_refused() {
    for density in [0.0, 1.0, -1.0, f64::NAN] {
        let made = Synthetic::new(SyntheticShape::Tiny, density, 1);
        assert!(matches!(made, Err(Error::Density { .. })));
    }
    assert!(matches!("opt-1t".parse::<SyntheticShape>(), Err(Error::UnknownSynthetic { .. })));
    assert_eq!("opt-1.3b".parse::<SyntheticShape>().unwrap(), SyntheticShape::Opt1b);
    assert_eq!("llama-1b".parse::<SyntheticShape>().unwrap(), SyntheticShape::Llama1b);
}
