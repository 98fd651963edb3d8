use super::*;
use crate::kv_cache::KvShape;
use crate::model::ModelInfo;
use crate::sampler::Sampling;
use powerinfer_ops::attention::{KvPages, PAGE_LEN};
use proptest::prelude::*;

const VOCAB: usize = 50;

/// Says the sum of all tokens so far, modulo the vocabulary; keeps the sums in its cache.
#[derive(Debug)]
struct Sum {
    info: ModelInfo,
    /// The forward pass over this position goes wrong, in this way.
    fault: Option<(usize, Fault)>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    Error,
    ErrorAfterCommit,
    NoCommit,
    FewLogits,
    Nan,
}

impl Sum {
    fn new(max_context: usize) -> Self {
        let kv =
            KvShape { n_layers: 1, n_kv_heads: 1, d_head: 1, max_context, ..KvShape::default() };
        let info =
            ModelInfo { vocab_size: VOCAB, eos_token_ids: vec![49], kv, ..ModelInfo::default() };
        Self { info, fault: None }
    }

    fn failing(position: usize, fault: Fault) -> Self {
        Self { fault: Some((position, fault)), ..Self::new(1000) }
    }
}

impl CausalLm for Sum {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn forward(&self, tokens: &[u32], cache: &mut KvCache, step: &mut Step) -> Result<()> {
        let have = cache.len();
        let fault = self.fault.filter(|(at, _)| (have..have + tokens.len()).contains(at));
        let fault = fault.map(|(_, fault)| fault);
        cache.reserve(tokens.len())?;
        if fault == Some(Fault::Error) {
            return Err(Error::Model("made to fail".into()));
        }
        let mut sum = match have.checked_sub(1) {
            Some(last) => cache.layer(0).page(last / PAGE_LEN).key(0, last % PAGE_LEN)[0],
            None => 0.0,
        };
        let sums: Vec<f32> = tokens
            .iter()
            .map(|token| {
                sum = (sum + *token as f32) % VOCAB as f32;
                sum
            })
            .collect();
        cache.write(0, &sums, &sums)?;
        let rows = step.wanted.n_rows(tokens.len());
        step.logits.clear();
        step.logits.resize(rows * VOCAB, 0.0);
        for (row, sum) in step.logits.chunks_mut(VOCAB).zip(&sums[sums.len() - rows..]) {
            row[*sum as usize] = 1.0;
        }
        step.stats.n_tokens += tokens.len() as u64;
        match fault {
            Some(Fault::FewLogits) => step.logits.truncate(VOCAB - 1),
            Some(Fault::Nan) => step.logits.fill(f32::NAN),
            _ => {}
        }
        if fault != Some(Fault::NoCommit) {
            cache.commit();
        }
        if fault == Some(Fault::ErrorAfterCommit) {
            return Err(Error::Model("made to fail".into()));
        }
        Ok(())
    }
}

/// What a session keeps.
#[derive(Debug)]
struct Kept {
    cache: KvCache,
    step: Step,
    history: Vec<u32>,
}

impl Kept {
    fn new(model: &Sum) -> Self {
        Self { cache: model.new_cache(), step: Step::default(), history: Vec::new() }
    }

    fn generate<'a>(
        &'a mut self,
        model: &'a Sum,
        prompt: &[u32],
        options: GenerationOptions,
    ) -> Result<Generation<'a>> {
        let Self { cache, step, history } = self;
        Generation::new(model, cache, step, history, prompt, options)
    }
}

fn tokens(n: usize) -> GenerationOptions {
    GenerationOptions::default().with_max_tokens(n)
}

/// The definition that generation is held to.
fn expected(prompt: &[u32], n: usize) -> Vec<u32> {
    let mut all = prompt.to_vec();
    for _ in 0..n {
        all.push(all.iter().sum::<u32>() % VOCAB as u32);
    }
    all.split_off(prompt.len())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn tokens_do_not_depend_on_the_chunks_of_the_prefill(
        prompt in prop::collection::vec(0u32..50, 1..200),
        chunk in 0usize..210,
        n in 1usize..20,
    ) {
        let model = Sum::new(300);
        let mut kept = Kept::new(&model);
        let options = tokens(n).with_prefill_chunk(chunk).with_ignore_eos(true);
        let generation = kept.generate(&model, &prompt, options).unwrap();
        let found: Vec<u32> = generation.map(|token| token.unwrap()).collect();
        prop_assert_eq!(&found, &expected(&prompt, n));
        prop_assert_eq!(kept.cache.len(), prompt.len() + n - 1);
        prop_assert_eq!(&kept.history, &[&prompt, &found[..n - 1]].concat());
    }
}

#[test]
fn what_a_session_holds_can_go_to_another_thread() {
    fn check<T: Send>() {}
    check::<Generation<'_>>();
    check::<(KvCache, Step, Sampler)>();
}

#[test]
fn nothing_runs_before_the_first_token_is_asked_for() {
    let model = Sum::failing(0, Fault::Error);
    let mut kept = Kept::new(&model);
    let generation = kept.generate(&model, &[1], tokens(3)).unwrap();
    assert_eq!(generation.stats(), &GenerationStats::default());
    assert_eq!((generation.finish_reason(), generation.pending()), (None, None));
    drop(generation);
    assert!(kept.cache.is_empty() && kept.history.is_empty());
}

#[test]
fn an_end_token_ends_and_is_not_given_out() {
    // 10, 20, 40, 30, 10, 20 and so on; then 49
    let model = Sum::new(100);
    let mut kept = Kept::new(&model);
    let mut generation = kept.generate(&model, &[49], tokens(9)).unwrap();
    assert!(generation.next().is_none());
    assert_eq!(generation.finish_reason(), Some(FinishReason::EndToken(49)));
    assert!(generation.next().is_none());
    assert_eq!((generation.stats().generated_tokens, generation.pending()), (0, None));
    assert_eq!(kept.history, [49]);

    let mut kept = Kept::new(&model);
    let options = tokens(9).with_stop_ids(vec![40, 3]);
    let mut generation = kept.generate(&model, &[10], options).unwrap();
    let found: Vec<u32> = generation.by_ref().map(|token| token.unwrap()).collect();
    assert_eq!(found, [10, 20]);
    assert_eq!(generation.finish_reason(), Some(FinishReason::EndToken(40)));
    assert_eq!(generation.stats().decode_tokens, 2);
    assert_eq!(kept.history, [10, 10, 20]);
}

#[test]
fn end_tokens_of_the_model_can_be_ignored_and_stop_ids_still_hold() {
    let model = Sum::new(100);
    let mut kept = Kept::new(&model);
    let options = tokens(9).with_ignore_eos(true).with_stop_ids(vec![48]);
    let mut generation = kept.generate(&model, &[49], options).unwrap();
    assert_eq!(generation.next().unwrap().unwrap(), 49);
    assert!(generation.next().is_none());
    assert_eq!(generation.finish_reason(), Some(FinishReason::EndToken(48)));
}

#[test]
fn the_reason_is_known_with_the_last_token() {
    let model = Sum::new(100);
    let mut kept = Kept::new(&model);
    let mut generation = kept.generate(&model, &[1, 2], tokens(2)).unwrap();
    assert_eq!(generation.next().unwrap().unwrap(), 3);
    assert_eq!((generation.finish_reason(), generation.pending()), (None, Some(3)));
    assert_eq!(generation.next().unwrap().unwrap(), 6);
    assert_eq!(generation.finish_reason(), Some(FinishReason::MaxTokens));
    assert_eq!(generation.pending(), Some(6));
    assert!(generation.next().is_none() && generation.next().is_none());
}

#[test]
fn no_tokens_still_run_the_prompt() {
    let model = Sum::new(100);
    let mut kept = Kept::new(&model);
    let mut generation = kept.generate(&model, &[1, 2], tokens(0)).unwrap();
    assert!(generation.next().is_none());
    assert_eq!(generation.finish_reason(), Some(FinishReason::MaxTokens));
    assert_eq!(generation.stats().prefill_tokens, 2);
    assert_eq!((kept.history, kept.cache.len()), (vec![1, 2], 2));
}

#[test]
fn a_text_can_be_gone_on_with() {
    let model = Sum::new(300);
    let mut kept = Kept::new(&model);
    let mut generation = kept.generate(&model, &[1, 2], tokens(3)).unwrap();
    let mut found: Vec<u32> = generation.by_ref().map(|token| token.unwrap()).collect();
    let pending = generation.pending().unwrap();
    let generation = kept.generate(&model, &[pending], tokens(3)).unwrap();
    found.extend(generation.map(|token| token.unwrap()));
    assert_eq!(found, expected(&[1, 2], 6));
}

#[test]
fn dropping_cancels_and_what_ran_stays() {
    let model = Sum::new(300);
    let mut kept = Kept::new(&model);
    let mut generation = kept.generate(&model, &[1, 2], tokens(100)).unwrap();
    generation.next().unwrap().unwrap();
    generation.next().unwrap().unwrap();
    drop(generation);
    assert_eq!(kept.history, [1, 2, 3]);
    assert_eq!(kept.cache.len(), 3);
}

#[test]
fn the_context_is_filled_to_its_last_token() {
    let model = Sum::new(6);
    for prompt_len in 1..=6 {
        let prompt = vec![1; prompt_len];
        let mut kept = Kept::new(&model);
        let mut generation = kept.generate(&model, &prompt, tokens(100)).unwrap();
        let found: Vec<u32> = generation.by_ref().map(|token| token.unwrap()).collect();
        assert_eq!(found, expected(&prompt, 7 - prompt_len));
        assert_eq!(generation.finish_reason(), Some(FinishReason::ContextFull));
        assert_eq!(kept.cache.len(), 6);
        assert!(matches!(
            kept.generate(&model, &[1], tokens(1)),
            Err(Error::ContextExceeded { have: 6, requested: 1, max: 6 })
        ));
    }
}

#[test]
fn what_cannot_work_is_refused_before_any_work() {
    let model = Sum::failing(0, Fault::Error);
    let mut kept = Kept::new(&model);
    let mut refused = |prompt: &[u32], options| kept.generate(&model, prompt, options).unwrap_err();
    assert!(matches!(refused(&[], tokens(1)), Error::EmptyPrompt));
    assert!(matches!(
        refused(&[1, 50], tokens(1)),
        Error::TokenOutOfRange { token: 50, vocab_size: 50 }
    ));
    assert!(matches!(
        refused(&[1; 1001], tokens(1)),
        Error::ContextExceeded { have: 0, requested: 1001, max: 1000 }
    ));
    let biased = Sampling::default().with_logit_bias(vec![(u32::MAX, 1.0)]);
    assert!(matches!(
        refused(&[1], tokens(1).with_sampling(biased)),
        Error::TokenOutOfRange { token: u32::MAX, .. }
    ));
    let invalid = Sampling::default().with_temperature(-1.0);
    assert!(matches!(
        refused(&[1], tokens(1).with_sampling(invalid)),
        Error::InvalidSampling { field: "temperature", .. }
    ));
    kept.history.push(1);
    assert!(matches!(
        kept.generate(&model, &[1], tokens(1)),
        Err(Error::CacheLength { expected: 1, found: 0 })
    ));
}

#[test]
fn a_failure_is_given_out_once_and_changes_nothing() {
    use Fault::{Error as Fails, ErrorAfterCommit, FewLogits, Nan, NoCommit};
    for fault in [Fails, ErrorAfterCommit, NoCommit, FewLogits, Nan] {
        // in the first piece of the prompt, in its last, and while decoding
        for position in [0, 4, 7] {
            // the logits of the first piece are not asked for
            if position == 0 && matches!(fault, FewLogits | Nan) {
                continue;
            }
            let faulty = Sum::failing(position, fault);
            let mut kept = Kept::new(&faulty);
            let options = tokens(9).with_prefill_chunk(3);
            let mut generation = kept.generate(&faulty, &[1, 1, 1, 1, 1], options.clone()).unwrap();
            let mut found = Vec::new();
            let error = loop {
                match generation.next().unwrap() {
                    Ok(token) => found.push(token),
                    Err(error) => break error,
                }
            };
            match fault {
                Fails | ErrorAfterCommit => assert!(matches!(error, Error::Model(_))),
                NoCommit => assert!(matches!(error, Error::CacheLength { .. }), "{error:?}"),
                FewLogits => {
                    assert!(matches!(error, Error::LogitsLength { expected: 50, found: 49 }));
                }
                Nan => assert!(
                    matches!(error, Error::NonFiniteLogits { position: at, .. } if at == position)
                ),
            }
            assert!(generation.next().is_none());
            assert_eq!(generation.finish_reason(), None);
            assert_eq!(generation.pending(), found.last().copied());

            // the same goes on with a model that works
            let ran = if position < 5 { 0 } else { position };
            assert_eq!((kept.history.len(), kept.cache.len()), (ran, ran));
            let model = Sum::new(1000);
            let prompt = if ran == 0 { vec![1; 5] } else { vec![*found.last().unwrap()] };
            let rest = kept.generate(&model, &prompt, options).unwrap();
            found.extend(rest.map(|token| token.unwrap()));
            assert_eq!(found, expected(&[1; 5], found.len()), "{fault:?} at {position}");
        }
    }
}

#[test]
fn prompt_and_continuation_are_counted_apart() {
    let model = Sum::new(1000);
    let mut kept = Kept::new(&model);
    kept.step.stats.n_tokens = 77;
    let options = tokens(4).with_prefill_chunk(2);
    let mut generation = kept.generate(&model, &[1; 5], options).unwrap();
    assert_eq!(generation.by_ref().count(), 4);
    let stats = generation.stats();
    assert_eq!((stats.prefill_tokens, stats.prefill.n_tokens), (5, 5));
    assert_eq!((stats.decode_tokens, stats.decode.n_tokens), (3, 3));
    assert_eq!(stats.generated_tokens, 4);
    assert!(stats.prefill_time.as_nanos() > 0 && stats.decode_time.as_nanos() > 0);
}
