//! What a session's cache takes, as the engine says and as the system sees it.
//!
//! One test and no more: others beside it would grow the process, too.
#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test may panic, and says if it is skipped"
)]

use powerinfer::core::{CausalLm, KvCache, KvShape, ModelInfo, Result as CoreResult, Step};
use powerinfer::{Engine, GenerateOptions, KvDtype};

/// Keys and values of a LLaMA of 1.1 billion parameters and nothing else of it.
#[derive(Debug)]
struct CacheOnly(ModelInfo);

impl CacheOnly {
    fn new(dtype: KvDtype) -> Self {
        let max_context = 128 << 10;
        let mut info = ModelInfo::default();
        info.vocab_size = 100;
        info.max_context = max_context;
        info.kv = KvShape { n_layers: 22, n_kv_heads: 4, d_head: 64, max_context, dtype };
        Self(info)
    }
}

impl CausalLm for CacheOnly {
    fn info(&self) -> &ModelInfo {
        &self.0
    }

    fn forward(&self, tokens: &[u32], cache: &mut KvCache, step: &mut Step) -> CoreResult<()> {
        cache.reserve(tokens.len())?;
        let kv = &self.0.kv;
        let rows = vec![1.0; tokens.len() * kv.n_kv_heads * kv.d_head];
        for layer in 0..kv.n_layers {
            cache.write(layer, &rows, &rows)?;
        }
        step.logits.clear();
        step.logits.resize(step.wanted.n_rows(tokens.len()) * self.0.vocab_size, 1.0);
        cache.commit();
        Ok(())
    }
}

/// Memory of this process; `None` where the system does not tell.
fn resident_bytes() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024.0)
}

#[test]
fn the_process_grows_by_what_the_cache_says_and_a_long_context_starts_with_nothing() {
    for dtype in KvDtype::ALL {
        let engine = Engine::builder().causal_lm(CacheOnly::new(dtype)).threads(1).build().unwrap();
        let kv = &engine.info().kv;
        let mut session = engine.session().unwrap();
        assert_eq!(session.cache_bytes(), 0);
        let options = GenerateOptions::default().with_max_tokens(0);
        // what else a session allocates is there after this
        session.generate_text(vec![1; 600], &options).unwrap();
        let (before, said_before) = (resident_bytes(), session.cache_bytes());
        session.generate_text(vec![1; 5000], &options).unwrap();
        let (after, said) = (resident_bytes(), session.cache_bytes());
        assert_eq!(said, kv.size_bytes(5600));
        let (Some(before), Some(after)) = (before, after) else {
            eprintln!("skipped: no /proc/self/status");
            return;
        };
        let (grown, said) = (after - before, (said - said_before) as f64);
        assert!((grown / said - 1.0).abs() < 0.05, "{dtype}: grown by {grown}, said {said}");
    }
}
