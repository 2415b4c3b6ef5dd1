//! Encodes the numbers of a page: columns of differences, deflated as one stream, in base64.

use std::io::{self, Write};

use base64::Engine as _;
use flate2::Compression;
use flate2::write::DeflateEncoder;
use serde_json::{Value, json};

/// Encoded columns of integers, one after another.
#[derive(Default)]
pub(super) struct Pack {
    bytes: Vec<u8>,
}

impl Pack {
    /// Adds a column. Returns the offset of its first byte, the count of its numbers, and their greatest
    /// common divisor.
    ///
    /// Each number is divided by the divisor and stored as its difference from the previous one, in zigzag
    /// encoding, seven bits per byte. Small changes take one byte, and deflate compresses the rest.
    pub(super) fn column(&mut self, numbers: impl Iterator<Item = i64> + Clone) -> Value {
        let unit = numbers.clone().fold(0, gcd).max(1);
        let start = self.bytes.len();
        let (mut last, mut count) = (0_i64, 0);
        for number in numbers {
            let number = number / unit;
            let step = number.wrapping_sub(last);
            last = number;
            count += 1;
            let mut rest = ((step << 1) ^ (step >> 63)).cast_unsigned();
            while rest >= 0x80 {
                self.bytes.push(rest as u8 | 0x80);
                rest >>= 7;
            }
            self.bytes.push(rest as u8);
        }
        json!([start, count, unit])
    }

    /// Writes the length of the JSON `about`, the JSON itself and the columns, deflated and in base64. Base64
    /// prevents a text of the trace from being read as HTML.
    pub(super) fn write(&self, about: &Value, out: &mut dyn Write) -> io::Result<()> {
        let about = about.to_string();
        let mut stream = DeflateEncoder::new(Vec::new(), Compression::new(6));
        stream.write_all(&(about.len() as u32).to_le_bytes())?;
        stream.write_all(about.as_bytes())?;
        stream.write_all(&self.bytes)?;
        let packed = stream.finish()?;
        out.write_all(base64::engine::general_purpose::STANDARD.encode(packed).as_bytes())
    }
}

fn gcd(a: i64, b: i64) -> i64 {
    let (mut a, mut b) = (a.unsigned_abs(), b.unsigned_abs());
    while b != 0 {
        (a, b) = (b, a % b);
    }
    // Only a divisor of 2^63 does not fit, and numbers in a trace use at most 63 bits.
    i64::try_from(a).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_stores_numbers_as_differences() {
        let mut pack = Pack::default();
        assert_eq!(pack.column([512, 1024, 0].into_iter()), json!([0, 3, 512]));
        assert_eq!(pack.column([0, 0].into_iter()), json!([3, 2, 1]));
        assert_eq!(pack.column([-300].into_iter()), json!([5, 1, 300]));
        assert_eq!(pack.bytes, [2, 2, 3, 0, 0, 1]);
    }
}
