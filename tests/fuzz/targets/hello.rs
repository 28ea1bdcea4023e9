//! First bytes of a connection to a TLS listener.

use strait::datapath::client_hello::{
    CLIENT_HELLO_BYTES_MAX, ClientHello, ClientHelloError, ClientHelloReader,
};
use strait::wire::sni::{self, IstioName};

/// Reads the size of segments from the first byte, and the ClientHello from the rest. The result
/// does not depend on the segments: it is parsed equally, replayed as received, and rejected at the
/// bound.
pub fn hello(data: &[u8]) {
    let Some((&size, bytes)) = data.split_first() else {
        return;
    };
    let whole = arrive(bytes, bytes.len().max(1));
    let sliced = arrive(bytes, usize::from(size).max(1));
    assert_eq!(essence(&whole), essence(&sliced));
    let Some(Ok(ClientHello { sni: Some(name), .. })) = &whole else {
        return;
    };
    assert_eq!(sni::normalise(name).as_ref(), Some(name));
    if let Some(istio) = IstioName::parse(name) {
        assert_eq!(*istio.to_string(), **name);
    }
}

fn arrive(bytes: &[u8], size: usize) -> Option<Result<ClientHello, ClientHelloError>> {
    let mut reader = ClientHelloReader::default();
    let mut at = 0;
    while at < bytes.len() {
        let end = bytes.len().min(at + size.min(reader.remaining()));
        assert!(end > at, "there is room until it is refused");
        match reader.push(&bytes[at..end]) {
            Ok(None) => at = end,
            Ok(Some(hello)) => {
                assert_eq!(hello.bytes, bytes[..end]);
                return Some(Ok(hello));
            }
            Err(refused) => {
                assert!(!refused.detail.is_empty() && refused.alert.len() <= 64);
                return Some(Err(refused));
            }
        }
    }
    assert!(bytes.len() < CLIENT_HELLO_BYTES_MAX);
    None
}

type Essence<'a> = Option<Option<(Option<&'a str>, bool)>>;

/// Returns the parsed part, without the number of further bytes that arrived with it.
fn essence(read: &Option<Result<ClientHello, ClientHelloError>>) -> Essence<'_> {
    let read = read.as_ref()?.as_ref();
    Some(read.ok().map(|hello| (hello.sni.as_deref(), hello.offers_istio)))
}
