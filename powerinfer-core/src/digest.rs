//! A short name for content: FNV-1a in 64 bits. It tells apart what differs by chance or by mistake, not
//! what somebody made to look alike.

/// Takes in bytes and gives a name for them.
///
/// # Examples
/// ```
/// use powerinfer_core::Digest;
/// let mut digest = Digest::default();
/// digest.update(b"foobar");
/// assert_eq!(digest.name(), "85944171f73967e8");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digest(u64);

impl Default for Digest {
    fn default() -> Self {
        Self(0xCBF2_9CE4_8422_2325)
    }
}

impl Digest {
    /// Takes in more bytes; where they are cut does not matter.
    pub fn update(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
        }
    }

    /// The name as a number.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.0
    }

    /// Sixteen hexadecimal digits.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{:016x}", self.0)
    }
}
