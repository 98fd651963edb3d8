//! A sampler of one's own: of the two likeliest tokens, by turns.

use powerinfer::{Engine, GenerateOptions};

fn main() -> powerinfer::Result<()> {
    let engine = Engine::builder().model("assets/llama-relu-tiny").build()?;
    let options = GenerateOptions::default().with_max_tokens(16).with_logits_hook(|so_far, logits| {
        let mut ranked: Vec<usize> = (0..logits.len()).collect();
        ranked.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        let mine = ranked[so_far.len() % 2];
        logits.fill(f32::NEG_INFINITY);
        logits[mine] = 0.0;
    });
    let own = engine.session()?.generate_text("It was a truth", &options)?;
    let greedy = GenerateOptions::default().with_max_tokens(16);
    let greedy = engine.session()?.generate_text("It was a truth", &greedy)?;
    assert_eq!(own.ids.len(), 16);
    assert_ne!(own.ids, greedy.ids);
    println!("{}", own.text);
    Ok(())
}
