//! The exact solver: how many groups of neurons of each layer are hot.
//!
//! Within a layer the hot neurons are the hottest, so a layer asks one number: how many groups. What
//! `g` groups are worth rises with `g`, ever more slowly, from the least number that pays for the
//! synchronisation on; below that only none is allowed. The naive way tries every `g` in every layer for
//! every rest of the budget: 80 layers × 35 840 groups × 448 choices for LLaMA-70B, a billion steps.
//!
//! Two facts make it fast without giving up the optimum:
//!
//! - Layers whose groups take the same bytes form a class, in which the budget is a count of groups.
//!   Adding a layer to the best values so far, `best[n] = max over g of best[n − g] + value(g)`, is a
//!   (max,+) product with a concave sequence. The best `n − g` never falls as `n` rises (a consequence of
//!   concavity; Aggarwal et al., "Geometric applications of a matrix-searching algorithm", 1987), so
//!   halving the range of `n` and scanning between the neighbours' answers takes `n log n` steps.
//! - Classes are then combined by lists of undominated (bytes, value) pairs. With the price per byte at
//!   which the budget is just used up, every choice has a loss against the best at that price, and a
//!   pair whose losses exceed the gap to the best plan known cannot lead to a better one. Few pairs
//!   are left; the last class is looked up.
//!
//! Values are whole numbers, so sums are exact and equals are equal.

use std::collections::BTreeMap;

/// What a layer offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LayerChoice {
    /// What each group adds, not rising.
    pub(crate) values: Vec<u64>,
    /// What each group takes.
    pub(crate) group_bytes: u64,
    /// The least number of groups, if there are any: from 1. Beyond the number of groups, none are.
    pub(crate) min_groups: usize,
}

/// The number of groups of each layer whose values have the largest sum within `capacity_bytes`. Of equals
/// always the same.
pub(crate) fn solve(layers: &[LayerChoice], capacity_bytes: u64) -> Vec<usize> {
    let mut by_bytes: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (layer, choice) in layers.iter().enumerate() {
        by_bytes.entry(choice.group_bytes.max(1)).or_default().push(layer);
    }
    let mut classes: Vec<Class> = by_bytes
        .into_iter()
        .map(|(unit_bytes, members)| Class::new(layers, members, unit_bytes, capacity_bytes))
        .collect();
    // the last is looked up instead of tried out
    classes.sort_by_key(|class| class.best.len());
    let mut groups = vec![0; layers.len()];
    for (class, n) in classes.iter().zip(combine(&classes, capacity_bytes)) {
        class.take(n, &mut groups);
    }
    groups
}

/// Layers whose groups take the same bytes.
struct Class {
    unit_bytes: u64,
    members: Vec<usize>,
    /// The best value of at most `n` groups.
    best: Vec<u64>,
    /// How many of the `n` groups each member takes.
    taken: Vec<Vec<u32>>,
}

impl Class {
    fn new(layers: &[LayerChoice], members: Vec<usize>, unit_bytes: u64, capacity: u64) -> Self {
        let most = usize::try_from(capacity / unit_bytes).unwrap_or(usize::MAX);
        let mut best = vec![0];
        let mut taken = Vec::with_capacity(members.len());
        for &layer in &members {
            let LayerChoice { values, min_groups, .. } = &layers[layer];
            let mut sums = vec![0; values.len() + 1];
            for (g, value) in values.iter().enumerate() {
                sums[g + 1] = sums[g] + value;
            }
            let len = best.len().saturating_add(values.len()).min(most.saturating_add(1));
            // more room than groups so far is worth what all of them are
            best.resize(len.max(best.len()), best.last().copied().unwrap_or(0));
            let (next, took) = add_layer(&best, &sums, (*min_groups).max(1));
            best = next;
            taken.push(took);
        }
        Self { unit_bytes, members, best, taken }
    }

    /// Writes the groups of each member where the class has `n`.
    fn take(&self, mut n: usize, groups: &mut [usize]) {
        for (&layer, taken) in self.members.iter().zip(&self.taken).rev() {
            // those before may have fewer groups altogether
            n = n.min(taken.len() - 1);
            groups[layer] = taken[n] as usize;
            n -= groups[layer];
        }
    }

    /// The most groups that `bytes` hold, as far as there are any.
    fn n_within(&self, bytes: u64) -> usize {
        let n = usize::try_from(bytes / self.unit_bytes).unwrap_or(usize::MAX);
        n.min(self.best.len() - 1)
    }
}

/// `max(best[n], max over g ≥ min_groups of best[n − g] + sums[g])` for every `n`, and the `g`.
fn add_layer(best: &[u64], sums: &[u64], min_groups: usize) -> (Vec<u64>, Vec<u32>) {
    let mut next = best.to_vec();
    let mut took = vec![0; best.len()];
    let most_groups = sums.len() - 1;
    if min_groups > most_groups || min_groups >= best.len() {
        return (next, took);
    }
    // ranges of n, each with the range in which its n − g lie
    let mut open = vec![(min_groups, best.len(), 0, best.len() - 1)];
    while let Some((first, end, low, high)) = open.pop() {
        if first >= end {
            continue;
        }
        let n = first + (end - first) / 2;
        let (from, to) = (low.max(n.saturating_sub(most_groups)), high.min(n - min_groups));
        let (mut found, mut value) = (from, 0);
        for rest in from..=to {
            let sum = best[rest] + sums[n - rest];
            // the first of equals, on which the order of the answers rests
            if rest == from || sum > value {
                (found, value) = (rest, sum);
            }
        }
        if value > next[n] {
            next[n] = value;
            took[n] = (n - found) as u32;
        }
        open.push((first, n, low, found));
        open.push((n + 1, end, found, high));
    }
    (next, took)
}

/// What was chosen in the classes so far.
#[derive(Clone, Copy)]
struct State {
    bytes: u64,
    value: u64,
    /// Which of the states of one class fewer it comes from, and the groups of this class.
    before: u32,
    n: u32,
}

/// Groups of each class with the largest sum of values within `capacity` bytes.
fn combine(classes: &[Class], capacity: u64) -> Vec<usize> {
    let Some((last, firsts)) = classes.split_last() else { return Vec::new() };
    if firsts.is_empty() {
        return vec![last.n_within(capacity)];
    }
    let price = Price::new(classes, capacity);
    let start = State { bytes: 0, value: 0, before: 0, n: 0 };
    let mut stages = vec![vec![start]];
    let mut known = price.known;
    // what the classes before would be worth at most, at the price
    let mut top_before = 0.0;
    for (index, class) in firsts.iter().enumerate() {
        let rest = price.rest(classes, index + 1);
        let top = price.value_at(class, price.choice[index]);
        let hopeless = |loss: f64, known: u64| price.bound - loss < known as f64 - price.slack;
        let options: Vec<(usize, f64)> = (0..class.best.len())
            .map(|n| (n, top - price.value_at(class, n)))
            .filter(|(_, loss)| !hopeless(*loss, known))
            .collect();
        let mut next = Vec::new();
        for (before, state) in stages[index].iter().enumerate() {
            let value_so_far = state.value as f64 - price.per_byte * state.bytes as f64;
            let loss_so_far = top_before - value_so_far;
            for &(n, loss) in &options {
                let bytes = state.bytes + n as u64 * class.unit_bytes;
                if bytes > capacity {
                    break;
                }
                if hopeless(loss_so_far + loss, known) {
                    continue;
                }
                let value = state.value + class.best[n];
                if bytes + rest.bytes <= capacity {
                    known = known.max(value + rest.value);
                }
                next.push(State { bytes, value, before: before as u32, n: n as u32 });
            }
        }
        top_before += top;
        stages.push(undominated(next));
    }
    let states = &stages[firsts.len()];
    let of_state = |state: &State| {
        let n = last.n_within(capacity - state.bytes);
        (state.value + last.best[n], n)
    };
    let mut found = (0, of_state(&states[0]));
    for (index, state) in states.iter().enumerate().skip(1) {
        let complete = of_state(state);
        if complete.0 > found.1.0 {
            found = (index, complete);
        }
    }
    let mut chosen = vec![found.1.1];
    let mut at = found.0;
    for states in stages[1..].iter().rev() {
        chosen.push(states[at].n as usize);
        at = states[at].before as usize;
    }
    chosen.reverse();
    chosen
}

/// Leaves out each state that another has at least the value of for at most the bytes.
fn undominated(mut states: Vec<State>) -> Vec<State> {
    states.sort_by_key(|state| (state.bytes, std::cmp::Reverse(state.value)));
    let mut most = None;
    states.retain(|state| {
        let better = most.is_none_or(|most| state.value > most);
        if better {
            most = Some(state.value);
        }
        better
    });
    states
}

/// The value of a byte at which the budget is just used up, and what follows from it.
struct Price {
    per_byte: f64,
    /// The least number of groups of each class that is worth most at this price.
    choice: Vec<usize>,
    /// No plan is worth more.
    bound: f64,
    /// What rounding may add to or take from `bound` and losses.
    slack: f64,
    /// The value of a plan that fits.
    known: u64,
}

/// What some classes take and give at the price.
#[derive(Default)]
struct Rest {
    bytes: u64,
    value: u64,
}

impl Price {
    fn new(classes: &[Class], capacity: u64) -> Self {
        let total: u64 = classes.iter().filter_map(|class| class.best.last()).sum();
        let mut price = Self { per_byte: 0.0, choice: vec![], bound: 0.0, slack: 0.0, known: 0 };
        if price.set(0.0, classes) > capacity {
            // a byte is worth at most all there is
            let (mut low, mut high) = (0.0, total as f64 + 1.0);
            for _ in 0..100 {
                let middle = (low + high) / 2.0;
                if price.set(middle, classes) > capacity { low = middle } else { high = middle }
            }
            price.set(high, classes);
        }
        let top: f64 =
            classes.iter().zip(&price.choice).map(|(class, &n)| price.value_at(class, n)).sum();
        price.bound = top + price.per_byte * capacity as f64;
        price.slack = 1e-9 * (total as f64 + price.bound);
        // the choice at this price, and what is left class by class
        let mut left = capacity.saturating_sub(price.rest(classes, 0).bytes);
        for (class, &n) in classes.iter().zip(&price.choice).rev() {
            let more = class.n_within(n as u64 * class.unit_bytes + left);
            left -= (more - n) as u64 * class.unit_bytes;
            price.known += class.best[more];
        }
        price
    }

    /// Sets the price and gives the bytes of what is chosen at it.
    fn set(&mut self, per_byte: f64, classes: &[Class]) -> u64 {
        self.per_byte = per_byte;
        self.choice = classes.iter().map(|class| self.best_at(class)).collect();
        self.rest(classes, 0).bytes
    }

    fn value_at(&self, class: &Class, n: usize) -> f64 {
        class.best[n] as f64 - self.per_byte * (n as u64 * class.unit_bytes) as f64
    }

    fn best_at(&self, class: &Class) -> usize {
        let mut found = (0, self.value_at(class, 0));
        for n in 1..class.best.len() {
            let value = self.value_at(class, n);
            if value > found.1 {
                found = (n, value);
            }
        }
        found.0
    }

    /// The classes from `first` on.
    fn rest(&self, classes: &[Class], first: usize) -> Rest {
        let mut rest = Rest::default();
        for (class, &n) in classes.iter().zip(&self.choice).skip(first) {
            rest.bytes += n as u64 * class.unit_bytes;
            rest.value += class.best[n];
        }
        rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    use good_lp::{
        Expression, Solution, SolverModel, Variable, constraint, microlp, variable, variables,
    };
    use testing::Seeded;

    fn value(layers: &[LayerChoice], groups: &[usize]) -> u64 {
        layers.iter().zip(groups).map(|(layer, &n)| layer.values[..n].iter().sum::<u64>()).sum()
    }

    fn bytes(layers: &[LayerChoice], groups: &[usize]) -> u64 {
        layers.iter().zip(groups).map(|(layer, &n)| layer.group_bytes * n as u64).sum()
    }

    fn check(layers: &[LayerChoice], capacity: u64, groups: &[usize]) {
        assert!(bytes(layers, groups) <= capacity, "{layers:?} {capacity}: {groups:?}");
        for (layer, &n) in layers.iter().zip(groups) {
            assert!(n == 0 || n >= layer.min_groups, "{layers:?} {capacity}: {groups:?}");
        }
    }

    /// The integer program of the paper's section on neuron placement: a binary variable a group and one
    /// a layer.
    fn judge(layers: &[LayerChoice], capacity: u64) -> u64 {
        let mut variables = variables!();
        let on: Vec<Variable> = layers.iter().map(|_| variables.add(variable().binary())).collect();
        let groups: Vec<Vec<Variable>> = layers
            .iter()
            .map(|layer| layer.values.iter().map(|_| variables.add(variable().binary())).collect())
            .collect();
        let mut objective = Expression::from(0.0);
        let mut taken = Expression::from(0.0);
        for (layer, groups) in layers.iter().zip(&groups) {
            for (&value, &group) in layer.values.iter().zip(groups) {
                objective += value as f64 * group;
                taken += layer.group_bytes as f64 * group;
            }
        }
        let mut program = variables.maximise(objective).using(microlp);
        program = program.with(constraint!(taken <= capacity as f64));
        for ((layer, groups), &on) in layers.iter().zip(&groups).zip(&on) {
            let n: Expression = groups.iter().sum();
            program = program.with(constraint!(n.clone() >= layer.min_groups as f64 * on));
            program = program.with(constraint!(n <= groups.len() as f64 * on));
        }
        let solution = program.solve().unwrap();
        let values = layers.iter().zip(&groups).flat_map(|(layer, groups)| {
            layer.values.iter().zip(groups).map(|(&value, &group)| match solution.value(group) {
                found if found > 0.5 => value,
                _ => 0,
            })
        });
        values.sum()
    }

    /// Few distinct values, so that many are equal; minimums, sometimes beyond the layer.
    fn instance(random: &mut Seeded, n_units: u64) -> (Vec<LayerChoice>, u64) {
        let n_layers = 1 + random.below(4);
        let most = [3, 9, 100][random.below(3)];
        let layers: Vec<LayerChoice> = (0..n_layers)
            .map(|_| {
                let n_groups = 1 + random.below(5);
                let mut values: Vec<u64> =
                    (0..n_groups).map(|_| random.below(most) as u64).collect();
                values.sort_unstable_by(|a, b| b.cmp(a));
                let group_bytes = 3 + random.below(n_units as usize) as u64;
                LayerChoice { values, group_bytes, min_groups: 1 + random.below(6) }
            })
            .collect();
        let all: u64 = layers.iter().map(|l| l.group_bytes * l.values.len() as u64).sum();
        let capacity = random.below(all as usize + 2) as u64;
        (layers, capacity)
    }

    #[test]
    fn the_objective_is_that_of_the_integer_program() {
        let mut random = Seeded::new(11);
        for n_units in [1, 2, 5, 40] {
            for _ in 0..60 {
                let (layers, capacity) = instance(&mut random, n_units);
                let groups = solve(&layers, capacity);
                check(&layers, capacity, &groups);
                let (found, expected) = (value(&layers, &groups), judge(&layers, capacity));
                assert_eq!(found, expected, "{layers:?} {capacity}: {groups:?}");
                assert_eq!(solve(&layers, capacity), groups);
            }
        }
    }

    /// A layer whose hottest groups are worth `top`, falling off as the exponential does.
    fn falling(n_groups: usize, top: f64, steep: f64) -> Vec<u64> {
        let share = |g: usize| g as f64 / n_groups as f64;
        (0..n_groups).map(|g| (top * (-steep * share(g)).exp()) as u64).collect()
    }

    #[test]
    fn a_model_of_70_billion_is_planned_in_under_a_second() {
        // groups of 64 of 28672 neurons, of f16; then of two formats, and of a predictor's rows of
        // other ranks in every layer
        let base = 3 * 64 * 8192 * 2;
        for (kinds, name) in [(1, "one"), (2, "two"), (5, "five"), (80, "all")] {
            for min_groups in [1, 40] {
                let layers: Vec<LayerChoice> = (0..80u64)
                    .map(|layer| LayerChoice {
                        values: falling(448, 1e6 + 3e4 * layer as f64, 3.0 + layer as f64 / 20.0),
                        group_bytes: base + 4096 * (layer % kinds),
                        min_groups,
                    })
                    .collect();
                for share in [0.05, 0.3, 0.7] {
                    let capacity = (share * 80.0 * 448.0 * base as f64) as u64;
                    let began = Instant::now();
                    let groups = solve(&layers, capacity);
                    check(&layers, capacity, &groups);
                    let seconds = began.elapsed().as_secs_f64();
                    eprintln!("{name} {min_groups} {share}: {seconds:.3} s");
                    // unoptimised or on a busy machine it may take longer, but not for ever
                    assert!(
                        seconds < 10.0,
                        "{name} kinds, from {min_groups}, {share}: {seconds} s"
                    );
                    let left = capacity - bytes(&layers, &groups);
                    assert!(left < base + 4096 * 80, "{left} bytes are left");
                }
            }
        }
    }
}
