//! The settings of the rotary position embedding, in the two forms that files have them.

use super::MAX_CONTEXT;
use super::field::Fields;
use crate::error::{Error, Result};

/// What configurations mean that give no `rope_theta`.
const DEFAULT_THETA: f64 = 10_000.0;

const SUPPORTED: &str = "default, linear, llama3";

/// How positions turn queries and keys.
#[derive(Debug, Clone, PartialEq)]
pub struct RotaryConfig {
    /// `rope_theta`: base of the frequencies, dimensionless; 10000 if absent.
    pub theta: f64,
    /// How the frequencies are changed for contexts longer than the model was trained on.
    pub scaling: RopeScaling,
}

/// How the frequencies of a rotary embedding are changed for long contexts.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every position is divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Slow frequencies are divided by `factor`, fast ones kept, those between blended
    /// (Llama 3.1).
    Llama3 {
        /// The divisor of slow frequencies.
        factor: f64,
        /// Frequencies that turn fewer times than this over the original context are slow.
        low_freq_factor: f64,
        /// Frequencies that turn more times than this are fast; above `low_freq_factor`.
        high_freq_factor: f64,
        /// Tokens of the context that the model was first trained on.
        original_max_context: usize,
    },
    /// Each frequency is divided by a number of its own, as a file's tensor says.
    Factors {
        /// `[d_head / 2]`, finite and positive.
        divisors: Vec<f32>,
    },
}

impl RotaryConfig {
    /// Reads `rope_theta`, `rope_scaling` and `rope_parameters`.
    pub(super) fn read(fields: &Fields<'_>) -> Result<Self> {
        let older = fields.object("rope_scaling")?;
        let newer = fields.object("rope_parameters")?;
        for fields in [Some(fields), older.as_ref(), newer.as_ref()].into_iter().flatten() {
            whole_head(fields)?;
        }
        let scaling = match (older.as_ref(), newer.as_ref()) {
            (None, None) => RopeScaling::None,
            (Some(one), None) | (None, Some(one)) => scaling(one)?,
            (Some(older), Some(newer)) => {
                let (older, newer) = (scaling(older)?, scaling(newer)?);
                if older != newer {
                    let expected = format!("the same as rope_parameters, {newer:?}");
                    return Err(fields.error("rope_scaling", expected));
                }
                newer
            }
        };

        let mut theta = None;
        for fields in [newer.as_ref(), older.as_ref(), Some(fields)].into_iter().flatten() {
            let Some(found) = fields.optional_positive("rope_theta")? else {
                continue;
            };
            if *theta.get_or_insert(found) != found {
                let expected =
                    format!("the same as in rope_parameters, {}", theta.unwrap_or(found));
                return Err(fields.error("rope_theta", expected));
            }
        }
        Ok(Self { theta: theta.unwrap_or(DEFAULT_THETA), scaling })
    }
}

/// Fails if the embedding covers only a part of each head.
fn whole_head(fields: &Fields<'_>) -> Result<()> {
    let name = "partial_rotary_factor";
    match fields.optional_positive(name)? {
        None | Some(1.0) => Ok(()),
        Some(_) => Err(fields.error(name, "1 (rotary embedding over the whole head)")),
    }
}

fn scaling(fields: &Fields<'_>) -> Result<RopeScaling> {
    let name = match (fields.optional_text("rope_type")?, fields.optional_text("type")?) {
        (Some(newer), Some(older)) if newer != older => {
            return Err(fields.error("type", format!("the same as rope_type, {newer:?}")));
        }
        (Some(name), _) | (None, Some(name)) => name,
        // the newer form may give nothing but the base
        (None, None) if fields.has_only("rope_theta") => "default",
        (None, None) => return Err(fields.error("rope_type", format!("one of {SUPPORTED}"))),
    };
    match name {
        "default" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear { factor: fields.positive("factor")? }),
        "llama3" => llama3(fields),
        unknown => Err(Error::UnknownRopeType {
            path: fields.path().to_owned(),
            found: unknown.to_owned(),
            supported: SUPPORTED,
        }),
    }
}

fn llama3(fields: &Fields<'_>) -> Result<RopeScaling> {
    let low_freq_factor = fields.positive("low_freq_factor")?;
    let high_freq_factor = fields.positive("high_freq_factor")?;
    // the blend divides by their difference
    if high_freq_factor <= low_freq_factor {
        let expected = format!("more than low_freq_factor, {low_freq_factor}");
        return Err(fields.error("high_freq_factor", expected));
    }
    Ok(RopeScaling::Llama3 {
        factor: fields.positive("factor")?,
        low_freq_factor,
        high_freq_factor,
        original_max_context: fields.count("original_max_position_embeddings", MAX_CONTEXT)?,
    })
}
