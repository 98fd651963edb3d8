//! Two threads, each with a session of its own, on one engine.

use powerinfer::{Engine, GenerateOptions};

fn main() -> powerinfer::Result<()> {
    let engine = Engine::builder().model("assets/llama-relu-tiny").build()?;
    let options = GenerateOptions::default().with_max_tokens(16);
    let tell = |prompt: &'static str| {
        let (engine, options) = (engine.clone(), options.clone());
        std::thread::spawn(move || engine.session()?.generate_text(prompt, &options))
    };
    let tellers = ["It was a truth", "The captain stood"].map(tell);
    for teller in tellers {
        let generated = teller.join().expect("the thread does not panic")?;
        assert_eq!(generated.ids.len(), 16);
        println!("{}", generated.text);
    }
    Ok(())
}
