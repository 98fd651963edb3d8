//! Ctrl-C as a wish to stop: what was done so far is worth keeping.

use powerinfer::CancelToken;

/// What a shell gives for a process that Ctrl-C ended.
const ENDED_BY_CTRL_C: i32 = 130;

/// A token that Ctrl-C cancels; a second one ends the process at once.
pub(crate) fn stop_on_ctrl_c() -> CancelToken {
    let token = CancelToken::new();
    let stop = token.clone();
    let watch = move || {
        // without a runtime Ctrl-C does what it always does
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
        runtime.block_on(async {
            while tokio::signal::ctrl_c().await.is_ok() {
                if stop.is_cancelled() {
                    std::process::exit(ENDED_BY_CTRL_C);
                }
                stop.cancel();
            }
        });
        Some(())
    };
    let _ = std::thread::Builder::new().spawn(watch);
    token
}
