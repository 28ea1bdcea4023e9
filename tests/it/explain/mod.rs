//! Answers of `/explain`, compared with the outcome of the same tunnels: on every kind of listener,
//! for peers and targets of random meshes.

mod world;

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::net::IpAddr;

use fastrand::Rng;
use http::{Method, Request};
use strait::admin::pages::RefusalsPage;
use strait::explain::{Answer, Outcome};
use strait::tools::hbone::{Client, ConnectError, Tunnel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::passthrough::client_hello;
use crate::support::{CLIENT, GATEWAY, identities, run, until};

use world::{BY_NAME, ISTIO, NARROW, ROUTES, WAYPOINT, World};

const TELLER: &str = "spiffe://west.local/ns/bank/sa/teller";
const OWN: &str = "spiffe://east.local/ns/shop/sa/checkout";
const UNLINKED: &str = "spiffe://south.local/ns/shop/sa/checkout";
const FOREIGN: &str = "spiffe://north.local/ns/shop/sa/checkout";

/// Tunnel: the listener, by its name and port, and the peer's input.
#[derive(Clone, Debug)]
struct TunnelRequest {
    listener: (&'static str, u16),
    from: Option<&'static str>,
    to: Option<String>,
    sni: String,
    alpn: Option<&'static str>,
    origin: Option<&'static str>,
}

/// Outcome of a tunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    opened: bool,
    reason: Option<String>,
    status: Option<u16>,
    alert: Option<u8>,
    reset: Option<String>,
}

impl Seen {
    fn of(outcome: &Outcome) -> Self {
        Self {
            opened: outcome.opened,
            reason: outcome.reason.clone(),
            status: outcome.status,
            alert: outcome.alert,
            reset: outcome.reset.clone(),
        }
    }

    fn nothing() -> Self {
        Self { opened: false, reason: None, status: None, alert: None, reset: None }
    }

    fn is_reported_by(&self, answer: &Answer) -> bool {
        answer.outcome.all().any(|outcome| Self::of(outcome) == *self)
    }
}

/// Returns random tunnels, over both kinds of HBONE listeners and all of TLS.
fn asks(rng: &mut Rng, world: &World) -> Vec<TunnelRequest> {
    let mut asks = Vec::new();
    for from in [CLIENT, TELLER, OWN, WAYPOINT, UNLINKED, FOREIGN] {
        for to in &world.authorities {
            let few = [FOREIGN, UNLINKED].contains(&from);
            if few && rng.u8(..8) > 0 {
                continue;
            }
            let listener = match rng.u8(..6) {
                0 => ("by-name", BY_NAME),
                _ => ("cross-network", 15008),
            };
            let origins = [None, None, Some("waypoint"), Some("gateway")];
            let other = rng.choice(&world.authorities).expect("an authority");
            let sni = name_of(if rng.u8(..3) == 0 { other } else { to });
            asks.push(TunnelRequest {
                listener,
                from: Some(from),
                to: Some(to.clone()),
                sni,
                alpn: None,
                origin: *rng.choice(&origins).expect("an origin"),
            });
        }
    }
    let tls = |listener, sni: String, alpn| TunnelRequest {
        listener,
        from: None,
        to: None,
        sni,
        alpn,
        origin: None,
    };
    for authority in &world.authorities {
        let (host, port) = (name_of(authority), authority.rsplit(':').next().unwrap_or_default());
        if host.parse::<IpAddr>().is_ok() {
            continue;
        }
        let subset = if rng.u8(..8) == 0 { "v1" } else { "" };
        let sni = format!("outbound_.{port}_.{subset}_.{host}");
        let alpn = (rng.u8(..5) > 0).then_some("istio");
        asks.push(tls(("sidecars", ISTIO), sni, alpn));
    }
    for sni in ["a.example", "b.example", "c.example", "d.example", "x.y.example", "gone.other"] {
        asks.push(tls(("routes", ROUTES), sni.to_owned(), None));
    }
    for sni in ["no.route", "example", "127.0.0.1"] {
        asks.push(tls(("routes", ROUTES), sni.to_owned(), None));
        asks.push(tls(("sidecars", ISTIO), sni.to_owned(), Some("istio")));
    }
    asks.push(tls(("narrow", NARROW), "a.example".to_owned(), Some("istio")));
    asks
}

/// Returns the host of an authority, as clients write it for a server name.
fn name_of(authority: &str) -> String {
    let host = authority.split(':').next().unwrap_or_default();
    host.trim_end_matches('.').to_lowercase()
}

async fn explained(world: &World, ask: &TunnelRequest) -> Answer {
    let mut path =
        format!("/explain?listener={}&address=127.0.0.1&sni={}", ask.listener.0, ask.sni);
    for (key, value) in [
        ("from", ask.from.map(ToOwned::to_owned)),
        ("to", ask.to.clone()),
        ("alpn", ask.alpn.map(ToOwned::to_owned)),
        ("origin", ask.origin.map(ToOwned::to_owned)),
    ] {
        if let Some(value) = value {
            path += &format!("&{key}={value}");
        }
    }
    let (status, body) = world.gateway.http(15000, "GET", &path).await;
    assert_eq!(status, 200, "{path}: {body}");
    serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}"))
}

/// Returns all ends of tunnels, handshakes and connections by their reasons.
async fn ends(world: &World) -> BTreeMap<String, f64> {
    let mut ends = world.gateway.tunnels_by_reason().await;
    let text = world.gateway.scrape().await;
    let counted = text.lines().filter_map(|line| {
        let names =
            ["strait_handshakes_refused_total{reason=\"", "strait_connections_shed_total{limit=\""];
        let rest = names.iter().find_map(|name| line.strip_prefix(name))?;
        let (reason, rest) = rest.split_once('"')?;
        let (_, count) = rest.rsplit_once(' ')?;
        Some((reason.to_owned(), count.parse().expect("a number")))
    });
    ends.extend(counted.filter(|&(_, count)| count > 0.0));
    ends
}

/// Opens the tunnel. Returns the reason for which it ended.
async fn made(world: &World, clients: &BTreeMap<(&str, u16), Client>, ask: &TunnelRequest) -> Seen {
    let before = ends(world).await;
    let mut seen = match ask.from {
        Some(from) => match clients.get(&(from, ask.listener.1)) {
            Some(client) => tunnelled(client, ask).await,
            None => refused(world, from, ask).await,
        },
        None => passed_on(world, ask).await,
    };
    let count = |ends: &BTreeMap<String, f64>| ends.values().sum::<f64>();
    let more = |now: &BTreeMap<String, f64>| count(now) > count(&before);
    let after = until("an end", async || ends(world).await, more).await;
    let mut reasons = after.iter().filter(|(reason, count)| before.get(*reason) != Some(count));
    let (reason, _) = reasons.next().expect("a reason");
    assert_eq!(reasons.next(), None, "one tunnel ends by one reason");
    seen.reason = (reason != "completed").then(|| reason.clone());
    seen
}

/// Connects a peer whose certificate is refused, which its first tunnel reports at the latest.
async fn refused(world: &World, from: &str, ask: &TunnelRequest) -> Seen {
    let tls = identities().client(from, GATEWAY);
    let address = world.net.address(1, ask.listener.1);
    if let Ok(client) = Client::connect(address, &tls).await {
        let to = ask.to.as_deref().expect("a target");
        client.tunnel(to).await.expect_err("no tunnel");
    }
    Seen::nothing()
}

async fn tunnelled(client: &Client, ask: &TunnelRequest) -> Seen {
    let uri = http::Uri::builder().authority(ask.to.as_deref().expect("a target"));
    let mut request = Request::builder().method(Method::CONNECT).uri(uri.build().expect("a URI"));
    if let Some(origin) = ask.origin {
        request = request.header("x-istio-source", origin);
    }
    let mut tunnel = match client.request(request.body(()).expect("a request")).await {
        Ok(tunnel) => tunnel,
        Err(ConnectError::Status(status)) => {
            return Seen { status: Some(status.as_u16()), ..Seen::nothing() };
        }
        Err(error) => panic!("{ask:?}: {error}"),
    };
    let hello = client_hello(&ask.sni, &[]);
    let mut echoed = Vec::new();
    let echo = async {
        tunnel.write_all(&hello).await?;
        tunnel.shutdown().await?;
        tunnel.read_to_end(&mut echoed).await
    };
    let ended = echo.await;
    Seen {
        opened: ended.is_ok(),
        status: Some(200),
        reset: ended.err().map(|error| {
            let code = Tunnel::reset_code(&error).expect("a reset");
            format!("{code:?}")
        }),
        ..Seen::nothing()
    }
}

async fn passed_on(world: &World, ask: &TunnelRequest) -> Seen {
    let address = world.net.address(1, ask.listener.1);
    let mut stream = match TcpStream::connect(address).await {
        Ok(stream) => stream,
        // A rejected peer may be reset this early.
        Err(error) if error.kind() == ErrorKind::ConnectionReset => return Seen::nothing(),
        Err(error) => panic!("{ask:?}: {error}"),
    };
    let hello = client_hello(&ask.sni, ask.alpn.as_slice());
    let mut answer = Vec::new();
    let talk = async {
        stream.write_all(&hello).await?;
        stream.shutdown().await?;
        stream.read_to_end(&mut answer).await
    };
    let talked = talk.await;
    if let Err(error) = talked {
        let kinds = [ErrorKind::ConnectionReset, ErrorKind::BrokenPipe, ErrorKind::NotConnected];
        assert!(kinds.contains(&error.kind()), "{ask:?}: {error}");
        return Seen::nothing();
    }
    let opened = answer == hello;
    Seen {
        opened,
        alert: (!opened).then(|| {
            assert_eq!(answer[..6], [21, 3, 3, 0, 2, 2], "{ask:?}");
            answer[6]
        }),
        ..Seen::nothing()
    }
}

/// Checks that the refusal is listed, and that its command gives its reason, if it has one.
async fn is_listed(world: &World, ask: &TunnelRequest, reason: &str) -> bool {
    let (_, page) = world.gateway.http(15000, "GET", "/refusals").await;
    let page: RefusalsPage = serde_json::from_str(&page).expect("a page");
    let row = page.refusals.iter().find(|row| {
        let requested = row.authority.as_deref().or(row.sni.as_deref());
        let is_from = row.identity.as_deref() == ask.from;
        let is_this = is_from && requested == Some(ask.to.as_deref().unwrap_or(&ask.sni));
        row.reason == reason && (is_this || requested.is_none())
    });
    let row = row.unwrap_or_else(|| panic!("{ask:?}: {reason}: {page:#?}"));
    let Some(command) = &row.explain else { return false };
    let arguments = command.strip_prefix("strait explain --").expect("a command");
    let arguments = arguments.replace('\'', "").replace(" --", "&").replace(' ', "=");
    let (status, body) = world.gateway.http(15000, "GET", &format!("/explain?{arguments}")).await;
    assert_eq!(status, 200, "{command}: {body}");
    let answer: Answer = serde_json::from_str(&body).expect("an answer");
    let mut outcomes = answer.outcome.all();
    assert!(outcomes.any(|it| it.reason.as_deref() == Some(reason)), "{command}: {answer:#?}");
    true
}

/// Returns the reasons that occurred and their counts, over the tunnels of one mesh.
async fn compared(seed: u64) -> BTreeMap<String, usize> {
    let mut rng = Rng::with_seed(seed);
    let world = World::start(&mut rng).await;
    let mut clients = BTreeMap::new();
    for from in [CLIENT, TELLER, OWN, WAYPOINT, UNLINKED] {
        for port in [15008, BY_NAME] {
            let tls = identities().client(from, GATEWAY);
            let client = Client::connect(world.net.address(1, port), &tls).await;
            clients.insert((from, port), client.expect("a connection"));
        }
    }
    let (mut reasons, mut last) = (BTreeMap::new(), Answer::default());
    let (mut wrong, mut certain, mut count, mut explained_again) = (0, 0, 0, 0);
    for ask in asks(&mut rng, &world) {
        let answer = explained(&world, &ask).await;
        let seen = made(&world, &clients, &ask).await;
        assert!(
            seen.is_reported_by(&answer),
            "seed {seed}: {ask:?}\n{seen:?}\n{answer:#?}\n{}",
            world.gateway.log().lines().last().unwrap_or_default()
        );
        assert_eq!(
            answer.outcome.opened || seen.opened,
            seen.opened || !answer.outcome.or.is_empty()
        );
        count += 1;
        wrong += usize::from(!seen.is_reported_by(&last));
        certain += usize::from(answer.outcome.or.is_empty());
        let reason = seen.reason.unwrap_or_else(|| "opened".to_owned());
        // The origin of a request is in no record.
        if reason != "opened" && seen.status != Some(200) && ask.origin.is_none() {
            explained_again += usize::from(is_listed(&world, &ask, &reason).await);
        }
        *reasons.entry(reason).or_default() += 1;
        last = answer;
    }
    // The check detects answers to the previous question, so an agreement is not by chance.
    assert!(wrong * 3 > count, "{wrong} of {count}");
    assert!(certain * 10 > count * 9, "{certain} of {count} are certain");
    assert!(explained_again * 5 > count, "{explained_again} of {count} refusals have a command");
    reasons
}

#[test]
fn every_refusal_and_every_opening_is_predicted() {
    run(async {
        let mut all = BTreeMap::<String, usize>::new();
        for seed in [1, 2] {
            for (reason, count) in compared(seed).await {
                *all.entry(reason).or_default() += count;
            }
        }
        let seen: BTreeSet<&str> = all.keys().map(String::as_str).collect();
        let wanted = BTreeSet::from([
            "bad_authority",
            "dial_denied",
            "no_endpoint",
            "no_istio_alpn",
            "no_waypoint",
            "not_exposed",
            "not_for_peer",
            "not_in_sources",
            "not_linked",
            "opened",
            "policy_denied",
            "sni_mismatch",
            "unknown_service",
            "unknown_sni",
            "untrusted_domain",
        ]);
        assert!(seen.is_superset(&wanted), "{all:?}");
    });
}
