//! Orthonormal rows, and the eigenvectors of a small symmetric matrix.

/// Sweeps over all pairs; a matrix of a few hundred rows needs about eight.
const MAX_SWEEPS: usize = 30;
/// What is left beside the diagonal, as a share of the whole, when it is done.
const DONE: f64 = 1e-12;

/// Makes the rows of width `width` orthonormal, one after the other (Gram and Schmidt's method, twice
/// each, since once loses digits). A row that depends on those before it becomes zero.
pub(super) fn orthonormalise(rows: &mut [f32], width: usize) {
    let width = width.max(1);
    for row in 0..rows.len() / width {
        let (before, rest) = rows.split_at_mut(row * width);
        let this = &mut rest[..width];
        let was = norm(this);
        for _ in 0..2 {
            for other in before.chunks_exact(width) {
                let product = dot(this, other);
                this.iter_mut().zip(other).for_each(|(value, other)| *value -= product * other);
            }
        }
        let left = norm(this);
        let scale = if left > 1e-6 * was { 1.0 / left } else { 0.0 };
        this.iter_mut().for_each(|value| *value *= scale);
    }
}

/// Eigenvalues of a symmetric matrix `[n, n]`, the largest first, and their eigenvectors, one a row:
/// Jacobi's rotations in f64.
pub(super) fn symmetric(matrix: &[f32], n: usize) -> (Vec<f32>, Vec<f32>) {
    let at = |row: usize, column: usize| row * n + column;
    let mut a = vec![0.0; n * n];
    for row in 0..n {
        for column in 0..n {
            // the two halves were rounded apart
            let sum = f64::from(matrix[at(row, column)]) + f64::from(matrix[at(column, row)]);
            a[at(row, column)] = sum / 2.0;
        }
    }
    // one eigenvector a row, so that a rotation touches two contiguous pieces
    let mut vectors = vec![0.0; n * n];
    (0..n).for_each(|i| vectors[at(i, i)] = 1.0);
    let whole: f64 = a.iter().map(|x| x * x).sum();
    for _ in 0..MAX_SWEEPS {
        let beside: f64 =
            (0..n).map(|i| (i + 1..n).map(|j| a[at(i, j)] * a[at(i, j)]).sum::<f64>()).sum();
        if beside <= DONE * whole {
            break;
        }
        for p in 0..n {
            for q in p + 1..n {
                let pq = a[at(p, q)];
                if pq * pq <= DONE * DONE * whole {
                    continue;
                }
                let theta = (a[at(q, q)] - a[at(p, p)]) / (2.0 * pq);
                let t = theta.signum() / (theta.abs() + (theta * theta + 1.0).sqrt());
                let c = 1.0 / (t * t + 1.0).sqrt();
                let s = t * c;
                for k in 0..n {
                    let (kp, kq) = (a[at(k, p)], a[at(k, q)]);
                    a[at(k, p)] = c * kp - s * kq;
                    a[at(k, q)] = s * kp + c * kq;
                }
                rotate(&mut a, n, (p, q), (c, s));
                rotate(&mut vectors, n, (p, q), (c, s));
            }
        }
    }
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|&i, &j| a[at(j, j)].total_cmp(&a[at(i, i)]));
    let values = order.iter().map(|&i| a[at(i, i)] as f32).collect();
    let rows = order.iter().flat_map(|&i| vectors[i * n..][..n].iter().map(|&x| x as f32));
    (values, rows.collect())
}

/// Turns two rows.
fn rotate(rows: &mut [f64], n: usize, (p, q): (usize, usize), (c, s): (f64, f64)) {
    let (first, second) = rows.split_at_mut(q * n);
    for (p, q) in first[p * n..][..n].iter_mut().zip(&mut second[..n]) {
        (*p, *q) = (c * *p - s * *q, s * *p + c * *q);
    }
}

/// In sixteen sums, which the compiler keeps in registers.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    let (a, a_rest) = a.as_chunks::<16>();
    let (b, b_rest) = b.as_chunks::<16>();
    for (a, b) in a.iter().zip(b) {
        for i in 0..16 {
            sums[i] += a[i] * b[i];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

fn norm(row: &[f32]) -> f32 {
    dot(row, row).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use testing::Seeded;

    #[test]
    fn eigenvectors_are_turned_to_multiples_of_themselves() {
        let n = 23;
        let half = Seeded::new(3).normal(n * n);
        let product = |i: usize, j: usize| dot(&half[i * n..][..n], &half[j * n..][..n]);
        let matrix: Vec<f32> = (0..n * n).map(|at| product(at / n, at % n)).collect();
        let (values, vectors) = symmetric(&matrix, n);
        assert!(values.is_sorted_by(|a, b| a >= b));
        for (value, vector) in values.iter().zip(vectors.chunks_exact(n)) {
            for i in 0..n {
                let turned = dot(&matrix[i * n..][..n], vector);
                assert!((turned - value * vector[i]).abs() < 1e-4 * values[0]);
            }
        }
    }

    #[test]
    fn rows_become_orthonormal_and_dependent_ones_zero() {
        let (n, width) = (6, 40);
        let mut rows = Seeded::new(5).normal(n * width);
        let (first, last) = rows.split_at_mut(5 * width);
        last.iter_mut().zip(first.iter()).for_each(|(last, first)| *last = -2.0 * first);
        orthonormalise(&mut rows, width);
        for i in 0..n {
            for j in 0..n {
                let expected = if i == j && i < 5 { 1.0 } else { 0.0 };
                let found = dot(&rows[i * width..][..width], &rows[j * width..][..width]);
                assert!((found - expected).abs() < 1e-5, "{i} {j} {found}");
            }
        }
    }
}
