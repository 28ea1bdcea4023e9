//! PROXY protocol, versions 1 and 2: the header by which a load balancer states the addresses of a
//! connection that it forwards.

use std::net::SocketAddr;

use ppp::{v1, v2};

/// Limit of a header in bytes. Version 1 has at most 107. Version 2 has 16, two addresses, and
/// fields that are ignored; nginx has the same limit.
pub const HEADER_BYTES_MAX: usize = 4096;

/// Limit of a header of version 1 in bytes.
const V1_BYTES_MAX: usize = 107;
/// First bytes of a header of version 1.
const V1_PREFIX: &[u8] = b"PROXY ";
/// Bytes of a header of version 2 before the addresses; the last two are the length of the rest.
const V2_FIXED_BYTES: usize = 16;

/// Place and value of the version and the command LOCAL in a header of version 2.
const V2_COMMAND: usize = 12;
const V2_LOCAL: u8 = 0x20;

/// Origin of a connection, as its header states it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The balancer forwards the connection of this peer, which it was made to this destination.
    Peer {
        source: SocketAddr,
        /// Address to which the peer connected.
        destination: SocketAddr,
    },
    /// The balancer forwards a connection, and states no addresses.
    Unknown,
    /// The balancer itself made the connection, for example for a health check.
    Balancer,
}

/// Parses the header at the start of a connection. Returns its origin and its length; none if more
/// bytes are needed.
///
/// # Errors
/// The bytes are not the start of a header, or it is too long or not one of TCP.
pub fn parse(bytes: &[u8]) -> Result<Option<(Origin, usize)>, String> {
    let Some(length) = header_length(bytes)? else {
        return Ok(None);
    };
    let Some(header) = bytes.get(..length) else {
        return Ok(None);
    };
    let origin = if header.starts_with(V1_PREFIX) {
        origin_v1(header).map_err(|error| error.to_string())
    } else if header.get(V2_COMMAND) == Some(&V2_LOCAL) {
        // Its family and addresses are ignored.
        Ok(Origin::Balancer)
    } else {
        let header = v2::Header::try_from(header).map_err(|error| error.to_string());
        header.and_then(|header| origin_v2(&header).ok_or_else(|| "not of TCP".to_owned()))
    };
    let origin = origin.map_err(|why| format!("the PROXY header is invalid: {why}"))?;
    Ok(Some((origin, length)))
}

/// Returns the length of the header, once it is known.
fn header_length(bytes: &[u8]) -> Result<Option<usize>, String> {
    let too_long = |max| format!("the PROXY header is longer than {max} bytes");
    let is_start_of = |prefix: &[u8]| {
        let common = bytes.len().min(prefix.len());
        bytes[..common] == prefix[..common]
    };
    if is_start_of(V1_PREFIX) {
        let line = &bytes[..bytes.len().min(V1_BYTES_MAX)];
        let end = line.iter().position(|byte| *byte == b'\n');
        let is_late = end.is_none() && line.len() == V1_BYTES_MAX;
        return if is_late { Err(too_long(V1_BYTES_MAX)) } else { Ok(end.map(|end| end + 1)) };
    }
    if !is_start_of(v2::PROTOCOL_PREFIX) {
        return Err("the connection does not begin with a PROXY header".to_owned());
    }
    let Some(&[high, low]) = bytes.get(V2_FIXED_BYTES - 2..V2_FIXED_BYTES) else {
        return Ok(None);
    };
    let length = V2_FIXED_BYTES + usize::from(u16::from_be_bytes([high, low]));
    if length > HEADER_BYTES_MAX {
        return Err(too_long(HEADER_BYTES_MAX));
    }
    Ok(Some(length))
}

fn origin_v1(header: &[u8]) -> Result<Origin, v1::BinaryParseError> {
    Ok(match v1::Header::try_from(header)?.addresses {
        v1::Addresses::Tcp4(of) => Origin::Peer {
            source: (of.source_address, of.source_port).into(),
            destination: (of.destination_address, of.destination_port).into(),
        },
        v1::Addresses::Tcp6(of) => Origin::Peer {
            source: (of.source_address, of.source_port).into(),
            destination: (of.destination_address, of.destination_port).into(),
        },
        v1::Addresses::Unknown => Origin::Unknown,
    })
}

/// Returns the origin; none of a connection that is not one of TCP.
fn origin_v2(header: &v2::Header<'_>) -> Option<Origin> {
    match (header.protocol, header.addresses) {
        (v2::Protocol::Stream, v2::Addresses::IPv4(of)) => Some(Origin::Peer {
            source: (of.source_address, of.source_port).into(),
            destination: (of.destination_address, of.destination_port).into(),
        }),
        (v2::Protocol::Stream, v2::Addresses::IPv6(of)) => Some(Origin::Peer {
            source: (of.source_address, of.source_port).into(),
            destination: (of.destination_address, of.destination_port).into(),
        }),
        (_, v2::Addresses::Unspecified) => Some(Origin::Unknown),
        _ => None,
    }
}

/// Returns the header of version 2 that states these addresses.
pub fn header(source: SocketAddr, destination: SocketAddr) -> Vec<u8> {
    let addresses = match (source, destination) {
        (SocketAddr::V4(_), SocketAddr::V4(_)) => v2::Addresses::from((source, destination)),
        _ => {
            let mapped = |address: SocketAddr| match address {
                SocketAddr::V4(v4) => (v4.ip().to_ipv6_mapped(), v4.port()).into(),
                SocketAddr::V6(_) => address,
            };
            v2::Addresses::from((mapped(source), mapped(destination)))
        }
    };
    let command = v2::Version::Two | v2::Command::Proxy;
    let built = v2::Builder::with_addresses(command, v2::Protocol::Stream, addresses).build();
    // Writes of 52 bytes to memory do not fail.
    built.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const V4: &[u8] = b"PROXY TCP4 192.0.2.1 198.51.100.2 40000 443\r\n";

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    fn peer(source: &str, destination: &str) -> Origin {
        Origin::Peer { source: address(source), destination: address(destination) }
    }

    fn v2(command: u8, family: u8, rest: &[u8]) -> Vec<u8> {
        let length = u16::try_from(rest.len()).expect("short").to_be_bytes();
        [v2::PROTOCOL_PREFIX, &[0x20 | command, family], &length, rest].concat()
    }

    #[test]
    fn a_header_is_read_at_any_split_and_ends_before_the_next_byte() {
        let v6 = "[2001:db8::1]:1";
        let tlv = [&[192, 0, 2, 1, 198, 51, 100, 2, 0x9c, 0x40, 1, 187][..], &[4; 300]].concat();
        let rows = [
            (V4.to_vec(), peer("192.0.2.1:40000", "198.51.100.2:443")),
            (b"PROXY TCP6 2001:db8::1 2001:db8::2 1 2\r\n".to_vec(), peer(v6, "[2001:db8::2]:2")),
            (b"PROXY UNKNOWN\r\n".to_vec(), Origin::Unknown),
            (b"PROXY UNKNOWN ::1 ::2 1 2\r\n".to_vec(), Origin::Unknown),
            (v2(1, 0x11, &tlv), peer("192.0.2.1:40000", "198.51.100.2:443")),
            (header(address(v6), address("192.0.2.1:2")), peer(v6, "[::ffff:192.0.2.1]:2")),
            (
                header(address("192.0.2.1:1"), address("192.0.2.2:2")),
                peer("192.0.2.1:1", "192.0.2.2:2"),
            ),
            (v2(1, 0, &[1, 2, 3]), Origin::Unknown),
            (v2(0, 0, &[]), Origin::Balancer),
            (v2(0, 0x11, &tlv), Origin::Balancer),
            (v2(0, 0x11, &[]), Origin::Balancer),
        ];
        for (bytes, origin) in rows {
            for end in 0..bytes.len() {
                assert_eq!(parse(&bytes[..end]), Ok(None), "{:?}", &bytes[..end]);
            }
            let followed = [&bytes[..], b"\x16\x03\x01\r\n"].concat();
            assert_eq!(parse(&followed), Ok(Some((origin, bytes.len()))));
        }
    }

    #[test]
    fn bytes_that_are_no_header_of_tcp_are_rejected_at_once() {
        let long = [b"PROXY UNKNOWN ", &[b'a'; 93][..]].concat();
        let rows = [
            (b"\x16".to_vec(), "does not begin"),
            (b"PROXx".to_vec(), "does not begin"),
            (b"PROXY TCP4 a b c d\r\n".to_vec(), "invalid"),
            (b"PROXY TCP4 192.0.2.1 192.0.2.2 1 2\n".to_vec(), "invalid"),
            (b"PROXY UDP4 192.0.2.1 192.0.2.2 1 2\r\n".to_vec(), "invalid"),
            (long, "longer than 107"),
            (v2(1, 0x12, &[0; 12]), "not of TCP"),
            (v2(1, 0x31, &[0; 216]), "not of TCP"),
            (v2(1, 0x11, &[0; 4]), "invalid"),
            (v2(2, 0x11, &[0; 12]), "invalid"),
            (v2(1, 0x11, &[0; 4081])[..16].to_vec(), "longer than 4096"),
        ];
        for (bytes, why) in rows {
            let error = parse(&bytes).expect_err("an error");
            assert!(error.contains(why), "{error}: {bytes:?}");
        }
    }
}
