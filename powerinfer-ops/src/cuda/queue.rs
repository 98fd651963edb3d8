//! What the sequences of kernels are written against: a queue that runs kernels one after another.
//!
//! On a GPU it is a CUDA stream; in tests it is a CPU (`testing/hostsim`, which includes this file
//! and its neighbours), so that not only the kernels but the order, sizes and arguments of their
//! launches are tested without a GPU.

/// A place in the device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address(pub u64);

impl Address {
    /// Nothing: an operand that is left out.
    pub const NULL: Self = Self(0);

    /// The place some bytes further on.
    #[must_use]
    pub fn offset(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// A parameter of a kernel.
#[derive(Debug, Clone, Copy)]
pub enum Arg {
    /// A pointer.
    Address(Address),
    /// A `size_t`.
    Size(u64),
    /// An `int`.
    Int(i32),
    /// A `float`.
    Float(f32),
}

impl From<Address> for Arg {
    fn from(address: Address) -> Self {
        Self::Address(address)
    }
}

impl From<usize> for Arg {
    /// An `int`: whatever is counted here was checked to fit when the matrix was laid out.
    fn from(n: usize) -> Self {
        Self::Int(i32::try_from(n).unwrap_or(i32::MAX))
    }
}

impl From<f32> for Arg {
    fn from(value: f32) -> Self {
        Self::Float(value)
    }
}

/// A kernel with its grid and parameters.
#[derive(Debug)]
pub struct Launch<'a> {
    /// The file that it is in, without `.cu`.
    pub file: &'static str,
    /// Its name.
    pub kernel: &'a str,
    /// Blocks in each dimension; none of them 0.
    pub grid: [u32; 3],
    /// Threads of a block: whole warps.
    pub threads: u32,
    /// Its parameters, in order.
    pub args: &'a [Arg],
}

/// Runs kernels in the order in which they are given to it.
pub trait Queue {
    /// Why a kernel could not be started.
    type Error;

    /// Appends a kernel.
    ///
    /// # Errors
    /// Whatever the device says.
    fn launch(&self, launch: &Launch<'_>) -> Result<(), Self::Error>;
}
