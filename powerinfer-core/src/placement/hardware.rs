//! What a machine can do: the speed and the room of both devices and of what lies between.

use std::fs;
use std::path::Path;

use powerinfer_ops::{ThreadPool, read_bandwidth};
use serde_json::{Map, Value, json};

use crate::config::field::Fields;
use crate::error::{Error, Result};
use crate::json;
use crate::regular_file::RegularFile;

/// Longest description that is read.
const MAX_BYTES: u64 = 1 << 16;
/// Keys of a description.
const KEYS: [&str; 6] =
    ["name", "host", "fast", "link_bytes_per_second", "sync_seconds", "alignment_bytes"];
const DEVICE_KEYS: [&str; 3] = ["bytes_per_second", "efficiency", "capacity_bytes"];
/// The largest alignment: sixty-four rows of whole cache lines are a multiple of any up to it.
const MAX_ALIGNMENT: usize = 4096;

/// Speed and room of a device's memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceMemorySpeed {
    /// What its data sheet or a measurement says, in bytes per second.
    pub bytes_per_second: f64,
    /// The share of it that decoding reaches.
    pub efficiency: f64,
    /// Bytes that there are for weights.
    pub capacity_bytes: u64,
}

impl DeviceMemorySpeed {
    /// Bytes of weights read per second.
    #[must_use]
    pub fn rate(&self) -> f64 {
        self.bytes_per_second * self.efficiency
    }

    /// Seconds to read that many bytes.
    #[must_use]
    pub(crate) fn seconds(&self, bytes: f64) -> f64 {
        bytes / self.rate()
    }
}

/// A machine with a host and a fast device.
///
/// # Examples
/// ```
/// use powerinfer_core::Hardware;
/// let machine = Hardware::preset("rtx-4090")?;
/// assert_eq!(machine.fast.bytes_per_second, 1008e9);
/// assert!(Hardware::preset("abacus").unwrap_err().to_string().contains("rtx-2080ti"));
/// # Ok::<(), powerinfer_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Hardware {
    /// What it is called.
    pub name: String,
    /// The CPU's memory.
    pub host: DeviceMemorySpeed,
    /// The fast device's memory.
    pub fast: DeviceMemorySpeed,
    /// Bytes per second between the two.
    pub link_bytes_per_second: f64,
    /// Seconds that it takes one to know that the other is done.
    pub sync_seconds: f64,
    /// What an allocation on the fast device is rounded up to: a power of two up to 4096.
    pub alignment_bytes: u64,
}

impl Hardware {
    /// Names of the presets: the paper's two machines.
    pub const PRESETS: [&str; 2] = ["rtx-4090", "rtx-2080ti"];

    /// One of the machines of the paper's section on the experimental setup. Bandwidths and
    /// capacities are the paper's; its efficiencies are fitted and the time of a synchronisation is
    /// assumed, both as [`simulate`](crate::simulate) says.
    ///
    /// # Errors
    /// [`Error::UnknownHardware`].
    pub fn preset(name: &str) -> Result<Self> {
        let gib = |n: u64| n << 30;
        let (fast, fast_capacity, host, host_capacity, link) = match name {
            "rtx-4090" => (1008e9, gib(24), 67.2e9, gib(192), 64e9),
            "rtx-2080ti" => (616e9, gib(11), 38.4e9, gib(64), 32e9),
            _ => {
                let supported = Self::PRESETS.join(", ");
                return Err(Error::UnknownHardware { found: name.to_owned(), supported });
            }
        };
        let device = |bytes_per_second, efficiency, capacity_bytes| DeviceMemorySpeed {
            bytes_per_second,
            efficiency,
            capacity_bytes,
        };
        Ok(Self {
            name: name.to_owned(),
            host: device(host, Self::HOST_EFFICIENCY, host_capacity),
            fast: device(fast, Self::FAST_EFFICIENCY, fast_capacity),
            link_bytes_per_second: link,
            sync_seconds: Self::SYNC_SECONDS,
            alignment_bytes: 256,
        })
    }

    /// This machine, with half of its threads and memory standing in for a fast device: the read bandwidth
    /// of `pool` over `bytes` of memory is measured, and what is not known of the memory's size is
    /// not limited.
    ///
    /// # Errors
    /// [`Error::Op`] if the memory for the measurement is not to be had.
    pub fn measured(pool: &ThreadPool, bytes: usize) -> Result<Self> {
        let found = read_bandwidth(pool, bytes, 3)?;
        // whole numbers, which a file holds as they are
        let bytes_per_second = (found.bytes_per_second / 2.0).round();
        let half =
            DeviceMemorySpeed { bytes_per_second, efficiency: 1.0, capacity_bytes: u64::MAX };
        Ok(Self {
            name: "this machine".to_owned(),
            host: half,
            fast: half,
            link_bytes_per_second: bytes_per_second,
            // one thread waking another
            sync_seconds: 10e-6,
            alignment_bytes: 64,
        })
    }

    /// Reads a description: a JSON object of the fields' names.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::FileTooLong`], [`Error::Json`], and [`Error::Config`] for a field that is
    /// missing, unknown or outside its range.
    pub fn load(path: &Path) -> Result<Self> {
        let bytes = RegularFile::open(path)?.read_all("a description of hardware", MAX_BYTES)?;
        Self::from_json(path, &bytes)
    }

    /// Reads a description; `path` is for errors.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn from_json(path: &Path, bytes: &[u8]) -> Result<Self> {
        let map = json::parse_object(path, bytes)?;
        let fields = Fields::new(path, &map);
        fields.only_keys(&KEYS)?;
        let device = |name: &str| -> Result<DeviceMemorySpeed> {
            let fields = fields.object(name)?.ok_or_else(|| fields.error(name, "an object"))?;
            fields.only_keys(&DEVICE_KEYS)?;
            let efficiency = fields.optional_positive("efficiency")?.unwrap_or(1.0);
            if efficiency > 1.0 {
                return Err(fields.error("efficiency", "a number above 0, at most 1"));
            }
            let capacity_bytes = match fields.has("capacity_bytes") {
                true => fields.bytes("capacity_bytes")?,
                false => u64::MAX,
            };
            let bytes_per_second = fields.positive("bytes_per_second")?;
            Ok(DeviceMemorySpeed { bytes_per_second, efficiency, capacity_bytes })
        };
        let alignment = fields.optional_count("alignment_bytes", MAX_ALIGNMENT)?.unwrap_or(256);
        if !alignment.is_power_of_two() {
            return Err(fields.error("alignment_bytes", "a power of two up to 4096"));
        }
        Ok(Self {
            name: fields.optional_text("name")?.unwrap_or("unnamed").to_owned(),
            host: device("host")?,
            fast: device("fast")?,
            link_bytes_per_second: fields.positive("link_bytes_per_second")?,
            sync_seconds: fields.not_negative("sync_seconds")?,
            alignment_bytes: alignment as u64,
        })
    }

    /// The description as JSON.
    #[must_use]
    pub fn to_json(&self) -> String {
        let device = |device: &DeviceMemorySpeed| {
            let mut map = Map::new();
            map.insert("bytes_per_second".into(), device.bytes_per_second.into());
            map.insert("efficiency".into(), device.efficiency.into());
            if device.capacity_bytes < u64::MAX {
                map.insert("capacity_bytes".into(), device.capacity_bytes.into());
            }
            Value::Object(map)
        };
        let json = json!({
            "name": self.name,
            "host": device(&self.host),
            "fast": device(&self.fast),
            "link_bytes_per_second": self.link_bytes_per_second,
            "sync_seconds": self.sync_seconds,
            "alignment_bytes": self.alignment_bytes,
        });
        format!("{json:#}\n")
    }

    /// Writes the description.
    ///
    /// # Errors
    /// [`Error::Write`].
    pub fn save(&self, path: &Path) -> Result<()> {
        fs::write(path, self.to_json())
            .map_err(|source| Error::Write { path: path.to_owned(), source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Hardware> {
        Hardware::from_json("h.json".as_ref(), text.as_bytes())
    }

    #[test]
    fn what_is_written_is_what_is_read() {
        for name in Hardware::PRESETS {
            let machine = Hardware::preset(name).unwrap();
            assert_eq!(read(&machine.to_json()).unwrap(), machine);
        }
        let pool = ThreadPool::new(None).unwrap();
        let mine = Hardware::measured(&pool, 1 << 20).unwrap();
        assert!(mine.host.rate() > 0.0);
        assert_eq!(read(&mine.to_json()).unwrap(), mine);
    }

    #[test]
    fn each_field_that_can_be_wrong_is_named() {
        let device = r#"{"bytes_per_second": 1e9, "capacity_bytes": 5}"#;
        let file = |host: &str, rest: &str| {
            format!(r#"{{"host": {host}, "fast": {device}, "link_bytes_per_second": 1e9, {rest}}}"#)
        };
        let fine = read(&file(device, r#""sync_seconds": 0"#)).unwrap();
        assert_eq!((fine.host.efficiency, fine.alignment_bytes), (1.0, 256));
        let sync = r#""sync_seconds": 0"#;
        for (text, field) in [
            (file(r#"{"bytes_per_second": 0}"#, sync), "host.bytes_per_second"),
            (file(r#"{"bytes_per_second": "x"}"#, sync), "host.bytes_per_second"),
            (file(r#"{"bytes_per_second": 1, "efficiency": 1.5}"#, sync), "host.efficiency"),
            (file(r#"{"bytes_per_second": 1, "capacity_bytes": -1}"#, sync), "host.capacity_bytes"),
            (
                file(r#"{"bytes_per_second": 1, "capacity_bytes": 0.5}"#, sync),
                "host.capacity_bytes",
            ),
            (file(r#"{"bytes_per_second": 1, "speed": 1}"#, sync), "host.speed"),
            (file("7", sync), "host"),
            (file(device, r#""sync_seconds": -1"#), "sync_seconds"),
            (file(device, r#""sync_seconds": 0, "alignment_bytes": 48"#), "alignment_bytes"),
            (file(device, r#""sync_seconds": 0, "alignment_bytes": 8192"#), "alignment_bytes"),
            (file(device, r#""sync_seconds": 0, "budget": 1"#), "budget"),
            (file(device, r#""name": "x""#), "sync_seconds"),
            ("{}".to_owned(), "host"),
        ] {
            let error = read(&text).unwrap_err();
            assert!(
                matches!(&error, Error::Config { field: named, .. } if named == field),
                "{text}: {error}"
            );
        }
    }
}
