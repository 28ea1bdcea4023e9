//! PROXY header of a load balancer, before the first byte of a peer.

use std::net::SocketAddr;

use strait::wire::proxy_protocol::{HEADER_BYTES_MAX, Origin, header, parse};

/// Reads the size of segments from the first byte, and the header from the rest. The result does
/// not depend on the segments or on what follows, and is known at the bound. The addresses survive
/// the header that this gateway writes.
pub fn proxy_header(data: &[u8]) {
    let Some((&size, bytes)) = data.split_first() else {
        return;
    };
    let whole = parse(bytes);
    assert!(bytes.len() < HEADER_BYTES_MAX || whole != Ok(None), "no end");
    for end in (0..bytes.len()).step_by(usize::from(size).max(1)) {
        match parse(&bytes[..end]) {
            Ok(None) => {}
            Ok(early) => assert_eq!(Ok(early), whole),
            Err(_) => assert!(whole.is_err()),
        }
    }
    let Ok(Some((origin, length))) = whole else {
        return;
    };
    assert!(length <= bytes.len() && length <= HEADER_BYTES_MAX);
    assert_eq!(parse(&bytes[..length]), Ok(Some((origin, length))));
    assert_eq!(parse(&bytes[..length - 1]), Ok(None));
    if let Origin::Peer { source, destination } = origin {
        assert_eq!(source.is_ipv4(), destination.is_ipv4());
        let plain = |of: SocketAddr| of == SocketAddr::new(of.ip(), of.port());
        assert!(plain(source) && plain(destination));
        let written = header(source, destination);
        assert_eq!(parse(&written), Ok(Some((origin, written.len()))));
    }
}
