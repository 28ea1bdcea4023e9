//! Parsing and formatting of sizes and durations.

use std::num::{NonZeroU32, NonZeroU64};
use std::time::Duration;

const SIZES: &[(&str, u64)] = &[
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("kB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("B", 1),
    ("", 1),
];
/// Limit of a request. It is held in memory once, and a stream's whole window may be.
const REQUEST_BYTES_MAX: u64 = 1 << 30;
/// Limit of a window in HTTP/2 (RFC 9113 section 6.9.1).
const WINDOW_BYTES_MAX: u64 = (1 << 31) - 1;
/// Limit of a duration, one day. A larger number probably means milliseconds.
const SECONDS_MAX: f64 = 86_400.0;

/// Parses a whole number of bytes, such as `128`, `64KiB` or `1MB`.
pub(super) fn size(text: &str) -> Result<NonZeroU64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit());
    let (number, unit) = text.split_at(digits.unwrap_or(text.len()));
    let factor = SIZES.iter().find(|(name, _)| *name == unit.trim());
    let bytes = factor.and_then(|(_, factor)| number.parse::<u64>().ok()?.checked_mul(*factor));
    bytes
        .and_then(NonZeroU64::new)
        .ok_or_else(|| "write a whole number of bytes, such as 128, 64KiB or 1MB".to_owned())
}

pub(super) fn request_size(text: &str) -> Result<NonZeroU64, String> {
    let size = size(text)?;
    if size.get() <= REQUEST_BYTES_MAX {
        Ok(size)
    } else {
        Err("a request has at most 1GiB".to_owned())
    }
}

pub(super) fn window(text: &str) -> Result<NonZeroU32, String> {
    let size = Some(size(text)?).filter(|size| size.get() <= WINDOW_BYTES_MAX);
    size.and_then(|size| NonZeroU32::try_from(size).ok())
        .ok_or_else(|| format!("a window has at most {WINDOW_BYTES_MAX} bytes"))
}

/// Parses seconds, such as `10` or `0.5`.
pub(super) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|&seconds| seconds <= SECONDS_MAX);
    seconds
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .filter(|time| !time.is_zero())
        .ok_or_else(|| "write a number of seconds, such as 10 or 0.5".to_owned())
}

/// Formats a size in three digits, such as `12.3 MB`.
pub(super) fn bytes(bytes: f64) -> String {
    let units = [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    match units.iter().find(|(size, _)| bytes >= *size) {
        Some((size, unit)) => format!("{} {unit}", three_digits(bytes / size)),
        None => format!("{bytes:.0} B"),
    }
}

/// Formats a number in three digits, or in as many as its whole part has.
pub(super) fn three_digits(number: f64) -> String {
    match number {
        number if number >= 100.0 => format!("{number:.0}"),
        number if number >= 10.0 => format!("{number:.1}"),
        number => format!("{number:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        for (text, bytes) in [
            ("128", 128),
            ("128B", 128),
            ("64KiB", 65_536),
            ("1 MiB", 1 << 20),
            ("2GiB", 2 << 30),
            ("5MB", 5_000_000),
        ] {
            assert_eq!(size(text).unwrap().get(), bytes, "{text}");
        }
        for text in ["", "0", "KiB", "-1", "1.5MB", "1k", "99999999999GiB", "1 0"] {
            assert!(size(text).is_err(), "{text}");
        }
        assert!(window("2GiB").is_err() && window("2147483647").is_ok());
        assert!(request_size("2GiB").is_err());
    }

    #[test]
    fn seconds_are_positive_and_finite() {
        assert_eq!(seconds("0.5").unwrap(), Duration::from_millis(500));
        for text in ["", "0", "-1", "NaN", "inf", "1e9", "10s"] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }

    #[test]
    fn figures_have_three_digits() {
        assert_eq!(bytes(999.0), "999 B");
        assert_eq!(bytes(12_345.0), "12.3 kB");
        assert_eq!(bytes(1_234_567_890.0), "1.23 GB");
        assert_eq!(three_digits(45_678.9), "45679");
    }
}
