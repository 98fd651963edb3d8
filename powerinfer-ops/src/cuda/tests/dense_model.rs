//! A small model of random weights, its parts on the CPU and on a device.

use candle_core::{Device, Tensor};
use testing::Seeded;

use super::cases::matrix;
use crate::attention::{
    AttentionShape, KvDtype, KvLayout, KvPage, KvPages, PAGE_LEN, causal_attention,
};
use crate::{
    Activation, AttentionPart, DensePart, DeviceSequence, FastDevice, FfnWeights, HeadPart,
    HeldAttention, HeldFfn, HeldHead, HeldNeurons, HeldNorm, HotRows, NeuronIds, NeuronMatrix,
    Neurons, NormPart, SequenceShape, Slot, WeightFormat, Workspace, ffn, linear,
};

/// What distinguishes a model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kind {
    pub(crate) format: WeightFormat,
    pub(crate) kv: KvDtype,
    /// Query heads, key and value heads, values of a head.
    pub(crate) heads: [usize; 3],
    pub(crate) window: Option<usize>,
    pub(crate) alibi: bool,
    pub(crate) rotary: bool,
    pub(crate) biased: bool,
    /// Layer norms, and a projection before the head.
    pub(crate) centred: bool,
    /// Share of neurons on the device.
    pub(crate) hot: f32,
}

pub(crate) const N_LAYERS: usize = 2;
const N_NEURONS: usize = 90;
const VOCAB: usize = 37;

#[derive(Debug)]
struct Norm {
    scale: Vec<f32>,
    shift: Option<Vec<f32>>,
    centred: bool,
}

#[derive(Debug)]
struct Dense {
    weights: NeuronMatrix,
    bias: Option<Vec<f32>>,
}

#[derive(Debug)]
struct Layer {
    norms: [Norm; 2],
    /// Query, key, value, output.
    projections: [Dense; 4],
    network: FfnWeights,
    down_bias: Vec<f32>,
    ids: [NeuronIds; 2],
}

/// The model on the CPU.
#[derive(Debug)]
pub(crate) struct Model {
    kind: Kind,
    pub(crate) d_model: usize,
    layers: Vec<Layer>,
    norm: Norm,
    projection: Option<Dense>,
    embeddings: NeuronMatrix,
    slopes: Option<Vec<f32>>,
}

/// Keys and values on the CPU.
#[derive(Debug, Default)]
pub(crate) struct Pages(Vec<KvPage>);

impl KvPages for Pages {
    fn page(&self, index: usize) -> &KvPage {
        &self.0[index]
    }
}

impl Norm {
    fn random(d: usize, centred: bool, random: &mut Seeded) -> Self {
        Self { scale: random.normal(d), shift: centred.then(|| random.normal(d)), centred }
    }

    fn part(&self) -> NormPart<'_> {
        let (scale, shift) = (&self.scale, self.shift.as_deref());
        NormPart { scale, shift, eps: 1e-5, centred: self.centred }
    }

    fn run(&self, x: &[f32]) -> Vec<f32> {
        let d = self.scale.len();
        let one = |x: &[f32]| -> Vec<f32> {
            let sum: f64 = x.iter().map(|&x| f64::from(x)).sum();
            let mean = if self.centred { sum / d as f64 } else { 0.0 };
            let square: f64 = x.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum();
            let root = (square / d as f64 + 1e-5).sqrt();
            let shift = |i: usize| self.shift.as_ref().map_or(0.0, |shift| f64::from(shift[i]));
            let value = |(i, x): (usize, &f32)| {
                (f64::from(*x) - mean) / root * f64::from(self.scale[i]) + shift(i)
            };
            x.iter().enumerate().map(|at| value(at) as f32).collect()
        };
        x.chunks(d).flat_map(one).collect()
    }
}

impl Dense {
    fn random(format: WeightFormat, [n_out, n_in]: [usize; 2], biased: bool, seed: u64) -> Self {
        // products of the size of their inputs
        let values: Vec<f32> = Seeded::new(seed)
            .normal(n_out * n_in)
            .iter()
            .map(|v| v / (n_in as f32).sqrt())
            .collect();
        let weights = NeuronMatrix::from_f32(format, n_out, n_in, &values).unwrap();
        Self { weights, bias: biased.then(|| Seeded::new(seed + 1).normal(n_out)) }
    }

    fn part(&self) -> DensePart<'_> {
        DensePart { weights: &self.weights, bias: self.bias.as_deref() }
    }

    fn run(&self, x: &[f32]) -> Vec<f32> {
        values(
            &linear(&self.weights, self.bias.as_deref(), &tensor(x, self.weights.d_model()))
                .unwrap(),
        )
    }
}

fn tensor(x: &[f32], width: usize) -> Tensor {
    Tensor::from_slice(x, (x.len() / width, width), &Device::Cpu).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

impl Model {
    pub(crate) fn random(kind: Kind) -> Self {
        let [n_heads, n_kv_heads, d_head] = kind.heads;
        let (width, kv) = (n_heads * d_head, n_kv_heads * d_head);
        // wider than the heads together
        let d_model = (width + 1).next_multiple_of(kind.format.block_len());
        let mut random = Seeded::new(1);
        let mut layer = |at: usize| {
            let dense = |shape, seed| {
                Dense::random(kind.format, shape, kind.biased, 100 * at as u64 + seed)
            };
            let m = |seed| {
                let shape = [N_NEURONS, d_model];
                Dense::random(kind.format, shape, false, 100 * at as u64 + seed).weights
            };
            let hot = random.ids(N_NEURONS, kind.hot);
            let cold = (0..N_NEURONS as u32).filter(|id| !hot.contains(id)).collect();
            Layer {
                norms: [(); 2].map(|()| Norm::random(d_model, kind.centred, &mut random)),
                projections: [
                    dense([width, d_model], 1),
                    dense([kv, d_model], 3),
                    dense([kv, d_model], 5),
                    dense([d_model, width], 7),
                ],
                network: FfnWeights::new(m(9), Some(m(11)), m(13), Activation::Relu).unwrap(),
                down_bias: random.normal(d_model),
                ids: [hot, cold].map(|ids| NeuronIds::from_sorted(ids).unwrap()),
            }
        };
        let layers = (0..N_LAYERS).map(&mut layer).collect();
        let d_embedding = if kind.centred { 64 } else { d_model };
        let projection =
            kind.centred.then(|| Dense::random(kind.format, [d_embedding, d_model], false, 31));
        let slopes = kind.alibi.then(|| (1..=n_heads).map(|h| 0.5f32.powi(h as i32)).collect());
        Self {
            kind,
            d_model,
            layers,
            norm: Norm::random(d_model, kind.centred, &mut random),
            projection,
            embeddings: matrix(kind.format, VOCAB, d_embedding, 33),
            slopes,
        }
    }

    pub(crate) fn shape(&self) -> SequenceShape {
        let [_, n_kv_heads, d_head] = self.kind.heads;
        let kv = KvLayout { n_kv_heads, d_head, dtype: self.kind.kv };
        SequenceShape { d_model: self.d_model, n_layers: N_LAYERS, kv }
    }

    /// Cosines and sines of positions.
    pub(crate) fn angles(&self, first_position: usize, n_tokens: usize) -> Option<[Vec<f32>; 2]> {
        let half = self.kind.heads[2] / 2;
        let positions = first_position..first_position + n_tokens;
        let angle = |p: usize, i: usize| p as f32 * 0.3f32.powi(i as i32);
        let table = |f: fn(f32) -> f32| {
            positions.clone().flat_map(|p| (0..half).map(move |i| f(angle(p, i)))).collect()
        };
        self.kind.rotary.then(|| [table(f32::cos), table(f32::sin)])
    }

    /// What the stream `x` becomes, and the logits of each token.
    pub(crate) fn on_cpu(
        &self,
        pages: &mut [Pages; N_LAYERS],
        first: usize,
        x: &[f32],
    ) -> [Vec<f32>; 2] {
        let mut x = x.to_vec();
        let workspace = &mut Workspace::default();
        for (layer, pages) in self.layers.iter().zip(pages) {
            let attended = self.attend(layer, pages, first, &layer.norms[0].run(&x));
            add(&mut x, &attended);
            let input = tensor(&layer.norms[1].run(&x), self.d_model);
            let (y, _) = ffn(&layer.network, Neurons::Firing, &input, workspace).unwrap();
            add(&mut x, &values(&y));
            x.chunks_mut(self.d_model).for_each(|x| add(x, &layer.down_bias));
        }
        let mut y = self.norm.run(&x);
        if let Some(projection) = &self.projection {
            y = projection.run(&y);
        }
        let head = Dense { weights: self.embeddings.clone(), bias: None };
        [x, head.run(&y)]
    }

    fn attend(&self, layer: &Layer, pages: &mut Pages, first: usize, x: &[f32]) -> Vec<f32> {
        let [n_heads, n_kv_heads, d_head] = self.kind.heads;
        let [mut q, mut k, v] = [0, 1, 2].map(|at: usize| layer.projections[at].run(x));
        let n_tokens = x.len() / self.d_model;
        if let Some(angles) = self.angles(first, n_tokens) {
            turn(&mut q, [n_heads, d_head], &angles);
            turn(&mut k, [n_kv_heads, d_head], &angles);
        }
        let width = n_kv_heads * d_head;
        for t in 0..n_tokens {
            let (page, place) = ((first + t) / PAGE_LEN, (first + t) % PAGE_LEN);
            if page == pages.0.len() {
                pages.0.push(KvPage::zeroed(self.shape().kv).unwrap());
            }
            let token = t * width..(t + 1) * width;
            pages.0[page].write(place, &k[token.clone()], &v[token]).unwrap();
        }
        let shape = AttentionShape {
            n_heads,
            n_kv_heads,
            d_head,
            scale: self.scale(),
            first_position: first,
            window: self.kind.window,
            alibi_slopes: self.slopes.as_deref(),
        };
        let q = tensor(&q, n_heads * d_head);
        let attended = causal_attention(&q, pages, shape, &mut Workspace::default()).unwrap();
        layer.projections[3].run(&values(&attended))
    }

    pub(crate) fn down_bias(&self, layer: usize) -> &[f32] {
        &self.layers[layer].down_bias
    }

    fn scale(&self) -> f32 {
        (self.kind.heads[2] as f32).sqrt().recip()
    }

    /// Copies all parts to a device.
    pub(crate) fn hold(&self, device: &dyn FastDevice) -> Held<'_> {
        let [n_heads, n_kv_heads, d_head] = self.kind.heads;
        let norm = |norm: &Norm| device.hold_norm(norm.part()).unwrap();
        let layer = |layer: &Layer| {
            let [query, key, value, output] = layer.projections.each_ref().map(Dense::part);
            let part = AttentionPart {
                query,
                key,
                value,
                output,
                n_heads,
                n_kv_heads,
                d_head,
                scale: self.scale(),
                window: self.kind.window,
                alibi_slopes: self.slopes.as_deref(),
                rotary: self.kind.rotary,
            };
            let rows = HotRows { weights: &layer.network, ids: &layer.ids[0], density: None };
            let network = device.hold(rows).unwrap();
            assert!(network.hold_down_bias(&layer.down_bias).unwrap());
            HeldLayer {
                norms: layer.norms.each_ref().map(norm),
                attention: device.hold_attention(part).unwrap(),
                network,
                cold: layer.network.pick(&layer.ids[1]).unwrap(),
            }
        };
        let head = HeadPart {
            norm: Some(self.norm.part()),
            projection: self.projection.as_ref().map(Dense::part),
            weights: &self.embeddings,
        };
        let layers = self.layers.iter().map(layer).collect();
        Held { model: self, layers, head: device.hold_head(head).unwrap() }
    }
}

/// Turns heads.
fn turn(x: &mut [f32], [n_heads, d_head]: [usize; 2], [cos, sin]: &[Vec<f32>; 2]) {
    let half = d_head / 2;
    for (t, x) in x.chunks_mut(n_heads * d_head).enumerate() {
        for head in x.chunks_mut(d_head) {
            for i in 0..half {
                let (c, s) = (cos[t * half + i], sin[t * half + i]);
                let (a, b) = (head[i], head[i + half]);
                (head[i], head[i + half]) = (a * c - b * s, a * s + b * c);
            }
        }
    }
}

#[derive(Debug)]
pub(crate) struct HeldLayer {
    pub(crate) norms: [Box<dyn HeldNorm>; 2],
    pub(crate) attention: Box<dyn HeldAttention>,
    pub(crate) network: Box<dyn HeldFfn>,
    cold: FfnWeights,
}

/// The model on a device.
#[derive(Debug)]
pub(crate) struct Held<'a> {
    model: &'a Model,
    pub(crate) layers: Vec<HeldLayer>,
    pub(crate) head: Box<dyn HeldHead>,
}

impl Held<'_> {
    /// What the stream `x` becomes, and the logits of each token.
    pub(crate) fn run(
        &self,
        sequence: &mut dyn DeviceSequence,
        first: usize,
        x: &[f32],
    ) -> [Vec<f32>; 2] {
        let (d, workspace) = (self.model.d_model, &mut Workspace::default());
        let angles = self.model.angles(first, x.len() / d);
        let angles = angles.as_ref().map(|[cos, sin]| [&cos[..], &sin[..]]);
        sequence.begin(first, x.len() / d, angles).unwrap();
        sequence.write(Slot::Residual, x).unwrap();
        for (at, layer) in self.layers.iter().enumerate() {
            layer.norms[0].run(sequence, Slot::Residual, Slot::AttentionInput).unwrap();
            layer.attention.run(sequence, at, Slot::AttentionInput).unwrap();
            layer.norms[1].run(sequence, Slot::Residual, Slot::FfnInput).unwrap();
            layer.network.start_in(HeldNeurons::Firing, sequence, Slot::FfnInput).unwrap();
            if layer.cold.n_neurons() == 0 {
                sequence.finish_ffn(None).unwrap();
                continue;
            }
            let mut input = Vec::new();
            sequence.read(Slot::FfnInput, &mut input).unwrap();
            let (part, _) =
                ffn(&layer.cold, Neurons::Firing, &tensor(&input, d), workspace).unwrap();
            sequence.finish_ffn(Some(&values(&part))).unwrap();
        }
        let (mut stream, mut logits) = (Vec::new(), Vec::new());
        self.head.run(sequence, 0..x.len() / d, &mut logits).unwrap();
        sequence.read(Slot::Residual, &mut stream).unwrap();
        assert_eq!(sequence.first_broken_token().unwrap(), None);
        [stream, logits]
    }
}
