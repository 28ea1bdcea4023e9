//! Valid and invalid ClientHellos, in every segmentation.

use std::sync::Arc;

use rustls::server::Acceptor;
use rustls::{ClientConfig, ClientConnection, RootCertStore};

use super::*;

/// Values that clients add to keep servers tolerant (RFC 8701).
const GREASE: [u16; 4] = [0x0a0a, 0x4a4a, 0x8a8a, 0xfafa];

/// Expected server name of a ClientHello, or its rejection.
type ExpectedName = Result<Option<Box<str>>, ()>;

/// Generated ClientHello with the expected result.
struct GeneratedHello {
    /// Handshake message, without records.
    message: Vec<u8>,
    sni: ExpectedName,
    offers_istio: bool,
}

/// Prefixes bytes with their length in `width` bytes.
fn sized(width: usize, bytes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(bytes.len()).expect("short").to_be_bytes();
    [&length[4 - width..], bytes].concat()
}

fn extension(kind: u16, body: &[u8]) -> Vec<u8> {
    [&kind.to_be_bytes()[..], &sized(2, body)].concat()
}

fn random(random: &mut fastrand::Rng, count: usize) -> Vec<u8> {
    std::iter::repeat_with(|| random.u8(..)).take(count).collect()
}

/// Returns server names with their expected results.
fn names() -> Vec<(Vec<u8>, ExpectedName)> {
    let read = |name: &str| Ok(Some(name.into()));
    let long = format!("{0}.{0}.{0}.{1}", "a".repeat(63), "a".repeat(61));
    vec![
        (b"echo.app".to_vec(), read("echo.app")),
        (b"ECHO.App.Example".to_vec(), read("echo.app.example")),
        (b"a_b._c".to_vec(), read("a_b._c")),
        (
            b"outbound_.8080_._.echo.app.svc.cluster.local".to_vec(),
            read("outbound_.8080_._.echo.app.svc.cluster.local"),
        ),
        (long.clone().into_bytes(), read(&long)),
        (b"10.0.0.1".to_vec(), Ok(None)),
        (b"2001:db8::1".to_vec(), Ok(None)),
        (b"a\0b".to_vec(), Err(())),
        (b"\xc3\xa9cho".to_vec(), Err(())),
        (b"*.app".to_vec(), Err(())),
        (b"a..b".to_vec(), Err(())),
        (b"a\nb".to_vec(), Err(())),
        ("a.".repeat(200).into_bytes(), Err(())),
    ]
}

fn key_shares(rng: &mut fastrand::Rng) -> Vec<u8> {
    let mut shares = [&GREASE[0].to_be_bytes()[..], &sized(2, &[0])].concat();
    if rng.u8(..8) == 0 {
        // X25519MLKEM768.
        shares.extend([0x11, 0xec]);
        shares.extend(sized(2, &random(rng, 1216)));
    }
    shares.extend([0, 29]);
    shares.extend(sized(2, &random(rng, 32)));
    sized(2, &shares)
}

/// Generates a ClientHello of TLS 1.2 or 1.3 with extensions in random order.
fn generate(rng: &mut fastrand::Rng) -> GeneratedHello {
    let names = names();
    let (name, sni) = rng.choice(&names).expect("a name");
    let mut sni = sni.clone();
    let protocols: [&[u8]; 4] = [b"h2", b"istio-http/1.1", b"istio", b"istiox"];
    let (alpn, offers_istio) = match rng.usize(..=protocols.len()) {
        0 => (None, false),
        count => (
            Some(protocols[..count].iter().flat_map(|one| sized(1, one)).collect::<Vec<_>>()),
            count >= 2,
        ),
    };
    let mut extensions = vec![
        extension(GREASE[1], &[]),
        extension(10, &sized(2, &[0x4a, 0x4a, 0x11, 0xec, 0, 29, 0, 23])),
        extension(13, &sized(2, &[4, 3, 8, 4, 4, 1])),
        extension(43, &sized(1, &[0x8a, 0x8a, 3, 4, 3, 3])),
        extension(51, &key_shares(rng)),
        extension(45, &sized(1, &[1])),
        extension(23, &[]),
        extension(35, &[]),
        extension(0xff01, &[0]),
        extension(GREASE[3], &[0]),
    ];
    match rng.u8(..8) {
        0 => sni = Ok(None),
        _ => extensions.push(extension(0, &sized(2, &[&[0][..], &sized(2, name)].concat()))),
    }
    extensions.extend(alpn.map(|all| extension(16, &sized(2, &all))));
    if rng.bool() {
        // Outer ECH: HKDF-SHA256, AES-128-GCM, identifier, encapsulated key, payload.
        let ech = [&[0, 0, 1, 0, 1, 7][..], &sized(2, &random(rng, 32))].concat();
        let payload = rng.usize(1..300);
        let ech = [ech, sized(2, &random(rng, payload))].concat();
        extensions.push(extension(0xfe0d, &ech));
    }
    if rng.bool() {
        let padding = rng.usize(..600);
        extensions.push(extension(21, &vec![0; padding]));
    }
    rng.shuffle(&mut extensions);
    let session = rng.usize(..=32);
    let body = [
        vec![3, 3],
        random(rng, 32),
        sized(1, &random(rng, session)),
        sized(2, &[0xfa, 0xfa, 0x13, 1, 0x13, 2, 0xc0, 0x2b]),
        sized(1, &[0]),
        sized(2, &extensions.concat()),
    ];
    GeneratedHello { message: [&[1][..], &sized(3, &body.concat())].concat(), sni, offers_istio }
}

/// Splits the message into records with sizes from `size`.
fn records(message: &[u8], mut size: impl FnMut() -> usize) -> Vec<u8> {
    let mut rest = message;
    let mut all = Vec::new();
    while !rest.is_empty() {
        let (now, later) = rest.split_at(size().min(rest.len()));
        all.extend([22, 3, 1]);
        all.extend(sized(2, now));
        rest = later;
    }
    all
}

/// Parses bytes in segments with sizes from `size`; returns none if they are incomplete. Checks
/// that the replayed bytes equal the received ones.
fn read_in_segments(
    bytes: &[u8],
    mut size: impl FnMut() -> usize,
) -> Option<Result<ClientHello, ClientHelloError>> {
    let mut reader = ClientHelloReader::default();
    let mut at = 0;
    while at < bytes.len() {
        let end = bytes.len().min(at + size().min(reader.remaining()));
        assert!(end > at, "there is room until it is refused");
        match reader.push(&bytes[at..end]) {
            Ok(None) => at = end,
            Ok(Some(hello)) => {
                assert_eq!(hello.bytes, bytes[..end], "the replay");
                return Some(Ok(hello));
            }
            Err(refused) => return Some(Err(refused)),
        }
    }
    assert!(bytes.len() < CLIENT_HELLO_BYTES_MAX, "more than the bound");
    None
}

/// Removes the bytes from a result, as the number of later bytes depends on the segmentation.
fn without_bytes(
    read: &Option<Result<ClientHello, ClientHelloError>>,
) -> Option<Result<(Option<&str>, bool), ()>> {
    let read = read.as_ref()?.as_ref().map_err(|_| ());
    Some(read.map(|hello| (hello.sni.as_deref(), hello.offers_istio)))
}

/// Reads bytes as an endpoint does. Returns none if it accepts no ClientHello.
fn read_by_rustls(mut bytes: &[u8]) -> Option<(Option<Box<str>>, bool)> {
    let mut acceptor = Acceptor::default();
    while !bytes.is_empty() {
        acceptor.read_tls(&mut bytes).ok()?;
        if let Some(accepted) = acceptor.accept().ok()? {
            let hello = accepted.client_hello();
            let offers_istio = hello.alpn().is_some_and(|mut all| all.any(is_istio_alpn));
            return Some((hello.server_name().and_then(sni::normalise), offers_istio));
        }
    }
    None
}

/// Parses the same bytes in different segmentations, and checks that the results are equal.
fn in_every_segmentation(
    bytes: &[u8],
    rng: &mut fastrand::Rng,
) -> Option<Result<ClientHello, ClientHelloError>> {
    let whole = read_in_segments(bytes, || usize::MAX);
    let some = read_in_segments(bytes, || rng.usize(1..200));
    assert_eq!(without_bytes(&some), without_bytes(&whole), "{}", bytes.escape_ascii());
    if rng.u8(..4) == 0 {
        let single = read_in_segments(bytes, || 1);
        assert_eq!(without_bytes(&single), without_bytes(&whole), "{}", bytes.escape_ascii());
    }
    whole
}

#[test]
fn ten_thousand_hellos_are_replayed_as_they_came_in_every_slicing() {
    let (mut accepted, mut refused) = (0, 0);
    for seed in 0..5_000 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let written = generate(&mut rng);
        let sliced = [
            records(&written.message, || usize::from(u16::MAX) / 4),
            records(&written.message, || 1),
            records(&written.message, || rng.usize(1..100)),
        ];
        for mut bytes in sliced {
            if rng.bool() {
                // Early data, which is meant for the endpoint.
                bytes.extend([23, 3, 3, 0, 5, 1, 2, 3, 4, 5]);
            }
            let read = in_every_segmentation(&bytes, &mut rng);
            let want = match &written.sni {
                Ok(sni) => Ok((sni.as_deref(), written.offers_istio)),
                Err(()) => Err(()),
            };
            assert_eq!(without_bytes(&read), Some(want), "seed {seed}");
        }
        let mutated = mutated(&written.message, &mut rng);
        let read = in_every_segmentation(&mutated, &mut rng);
        if let Some((sni, offers_istio)) = read_by_rustls(&mutated) {
            let want = Some(Ok((sni.as_deref(), offers_istio)));
            assert_eq!(without_bytes(&read), want, "seed {seed}");
        }
        match read {
            Some(Ok(_)) => accepted += 1,
            Some(Err(_)) => refused += 1,
            None => {}
        }
    }
    assert!(accepted > 500 && refused > 500, "{accepted}, {refused}");
}

/// Mutates bytes of the message or of its records.
fn mutated(message: &[u8], rng: &mut fastrand::Rng) -> Vec<u8> {
    let change = |bytes: &mut Vec<u8>, rng: &mut fastrand::Rng| {
        let at = rng.usize(..bytes.len());
        match rng.u8(..4) {
            0 => bytes.insert(at, rng.u8(..)),
            1 => drop(bytes.remove(at)),
            2 => bytes.truncate(at.max(1)),
            _ => bytes[at] = rng.u8(..),
        }
    };
    let mut message = message.to_vec();
    let in_message = rng.bool();
    if in_message {
        change(&mut message, rng);
    }
    let mut bytes = records(&message, || rng.usize(1..2000));
    if !in_message {
        change(&mut bytes, rng);
    }
    bytes
}

#[test]
fn what_never_becomes_a_hello_ends_at_the_bound_with_an_alert() {
    // A message with a declared length of 64 KiB, in records of one byte and of many.
    for size in [1, 100, 10_000] {
        let message = [&[1, 0, 0xff, 0xff][..], &[0; 0xffff]].concat();
        let endless = records(&message, || size);
        let refused = read_in_segments(&endless, || 1000).expect("an end").expect_err("no hello");
        assert_eq!(refused.refusal, HandshakeRefusal::Other);
        assert_eq!(refused.alert, alert(40), "{}", refused.detail);
    }
    for text in [&b"GET / HTTP/1.1\r\n"[..], &[0; 100], b"SSH-2.0-OpenSSH_9.2\r\n"] {
        let refused = read_in_segments(text, || 1).expect("an end").expect_err("no hello");
        assert!(!refused.detail.is_empty());
    }
}

#[test]
fn what_an_endpoint_could_read_otherwise_is_refused_by_an_alert() {
    let named = |name: &[u8]| [&[0][..], &sized(2, name)].concat();
    let names = |all: &[&[u8]]| {
        let all: Vec<_> = all.iter().flat_map(|name| named(name)).collect();
        extension(0, &sized(2, &all))
    };
    let refused_with = |compressions: &[u8], extensions: &[u8]| {
        let body = [
            &[3, 3][..],
            &[7; 32],
            &sized(1, &[]),
            &sized(2, &[0x13, 1]),
            &sized(1, compressions),
            &sized(2, extensions),
        ];
        let message = [&[1][..], &sized(3, &body.concat())].concat();
        let read = read_in_segments(&records(&message, || 7), || 5).expect("whole");
        read.map(|hello| hello.sni).map_err(|refused| refused.alert)
    };
    let refused = |extensions: &[u8]| refused_with(&[0], extensions);
    let protocols = extension(16, &sized(2, &sized(1, b"istio")));
    assert_eq!(refused(&names(&[b"a.b"])), Ok(Some("a.b".into())));
    assert_eq!(refused(&[]), Ok(None));
    for (extensions, description) in [
        (names(&[b"a.b"]).repeat(2), DECODE_ERROR),
        (protocols.repeat(2), DECODE_ERROR),
        (names(&[b"a.b", b"c.d"]), DECODE_ERROR),
        (names(&[]), DECODE_ERROR),
        (extension(0, &sized(2, &[&[1][..], &sized(2, b"a.b")].concat())), DECODE_ERROR),
        (extension(0, &[&sized(2, &named(b"a.b"))[..], b"x"].concat()), DECODE_ERROR),
        (extension(16, &sized(2, &sized(1, b""))), DECODE_ERROR),
        ([names(&[b"a.b"]), vec![0, 21, 0, 1]].concat(), DECODE_ERROR),
        (names(&[b"*.b"]), ILLEGAL_PARAMETER),
        (names(&[b""]), ILLEGAL_PARAMETER),
    ] {
        assert_eq!(refused(&extensions), Err(alert(description).into()), "{extensions:?}");
    }
    // An endpoint of TLS 1.2 ignores other methods beside the null one.
    assert_eq!(refused_with(&[1, 0], &[]), Ok(None));
    for (compressions, description) in
        [(&[1][..], ILLEGAL_PARAMETER), (&[1, 64], ILLEGAL_PARAMETER), (&[], DECODE_ERROR)]
    {
        let answer = refused_with(compressions, &[]);
        assert_eq!(answer, Err(alert(description).into()), "{compressions:?}");
    }
}

#[test]
fn the_hellos_of_our_own_tls_library_are_read() {
    for (sni, alpn) in [("Echo.App", &["istio"][..]), ("10.0.0.1", &[]), ("a", &["h2"])] {
        let mut config = ClientConfig::builder()
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        config.alpn_protocols = alpn.iter().map(|one| one.as_bytes().to_vec()).collect();
        let name = sni.try_into().expect("a name");
        let mut client = ClientConnection::new(Arc::new(config), name).expect("a client");
        let mut bytes = Vec::new();
        client.write_tls(&mut bytes).expect("a hello");
        assert!(bytes.len() > 1216, "with a post-quantum share");
        let hello = read_in_segments(&bytes, || 7).expect("whole").expect("a hello");
        let wanted = (sni != "10.0.0.1").then(|| sni.to_ascii_lowercase());
        assert_eq!(hello.sni.as_deref(), wanted.as_deref());
        assert_eq!(hello.offers_istio, alpn == ["istio"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_hello_that_does_not_come_is_given_up_after_five_seconds() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a listener");
    let address = listener.local_addr().expect("an address");
    let _client = TcpStream::connect(address).await.expect("a client");
    let (mut stream, _) = listener.accept().await.expect("a connection");
    let start = tokio::time::Instant::now();
    let refused = read_client_hello(&mut stream).await.expect_err("no hello");
    assert_eq!(refused.refusal, HandshakeRefusal::Timeout);
    assert_eq!(start.elapsed(), CLIENT_HELLO_DEADLINE);
}
