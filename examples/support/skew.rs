//! How unevenly the neurons of a synthetic model fire, as a command line asks for it.

use powerinfer::models::Error;
use powerinfer::models::synthetic::Synthetic;

use super::report::{Outcome, wrong_usage};

/// The model with that `--hot-share`, if it can be had at its `--density`.
pub(crate) fn skewed(synthetic: Synthetic, hot_share: f64) -> Outcome<Synthetic> {
    match synthetic.with_skew(hot_share) {
        Err(Error::Skew { found, density }) => wrong_usage(&format!(
            "--hot-share {found}: expected a number from 0.001 to 0.8 that neurons can have at --density \
             {density}, as no neuron fires more often than always"
        )),
        made => Ok(made?),
    }
}
