//! Dry run of a tunnel: its predicted outcome, with the decisions that lead to it.
//!
//! The functions that real tunnels call decide, and their results are described here, so that the
//! answer cannot differ from real tunnels. It computes the probability of each pick in place of one
//! pick, and dials nothing. It neither counts nor logs. It cannot tell whether an endpoint answers.

mod answer;
mod binding;
mod endpoints;
mod outcomes;
mod question;
mod remedies;
mod rules;
mod servers;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::SystemTime;

use tokio::time::Instant;

use crate::datapath::client_hello::{ClientHello, is_istio_alpn};
use crate::datapath::dial::DenyList;
use crate::datapath::forward::{establish, sni};
use crate::datapath::http2::tunnel::{Forwarded, Target};
use crate::datapath::identity::Peer;
use crate::datapath::listener::{Listener, ListenerRules};
use crate::datapath::policy::{self, Permit, Rejection};
use crate::reason::{HandshakeRefusal, Reason};
use crate::snapshot::{Enforcement, Snapshot};
use crate::status::{HeldRemovals, ReducedLink};
use crate::tls::{Identity, Issuer};
use crate::wire::sni::{RouteBy, normalise};
use crate::wire::{Authority, SpkiHash};

pub use answer::{
    Answer, EndpointRow, EntryRow, GroupRow, ListenerRow, LookupRow, Outcome, PeerRow,
    RejectionForm, RouteRow, RuleRow, UnusedRow,
};
use question::OWN_HASH;
pub use question::Question;
pub use remedies::ConfigPositions;

const NO_TARGET: &str = "no target; write --to with an authority, such as `--to \
                         echo.app.svc.cluster.local:80`, or --sni with a server name";

/// State that the question is evaluated against.
#[derive(Clone, Copy, Debug)]
pub struct ExplainState<'a> {
    pub snapshot: &'a Snapshot,
    /// Addresses that are never dialled.
    pub deny: &'a DenyList,
    pub listeners: &'a [(String, ListenerRules)],
    pub bindings: &'a [Arc<Listener>],
    pub places: &'a ConfigPositions,
    /// Links whose exceeded budget reduces weights.
    pub links: &'a [ReducedLink],
    /// Removals that are held.
    pub held: &'a [HeldRemovals],
    /// True if the budget of buffered bytes admits a new tunnel.
    pub has_room: bool,
    /// Time of the question, which decides which ejections have ended.
    pub now: Instant,
}

impl ExplainState<'_> {
    fn room(&self) -> Result<(), Reason> {
        self.has_room.then_some(()).ok_or(Reason::BuffersFull)
    }
}

/// Predicts the outcome of a tunnel.
///
/// # Errors
/// The defect of the question, with the remedy.
pub fn run(state: &ExplainState<'_>, question: &Question) -> Result<Answer, String> {
    let forwarded = question.forwarded()?;
    let explainer = Explainer { state, question, forwarded: forwarded.as_ref() };
    if let Some(wanted) = &question.binding {
        return binding::run(explainer, wanted);
    }
    let (name, listener) = select_listener(state, question)?;
    let is_tls = listener.is_passthrough();
    let protocol = if is_tls { "tls" } else { "hbone" };
    let mut answer = Answer {
        snapshot: state.snapshot.version,
        listener: ListenerRow { name: name.clone(), protocol: protocol.to_owned() },
        policies: enforcement(state.snapshot).to_owned(),
        ..Answer::default()
    };
    if let Some(address) = question.address.filter(|address| listener.is_balancer(*address)) {
        answer.notes.push(format!(
            "{address} is in `balancers`: a peer behind it has the address of its PROXY header, \
             which --address would be"
        ));
    }
    match question.address {
        Some(address) if !listener.admits(address) => {
            answer.outcome = Outcome::not_in_sources();
            return Ok(answer);
        }
        None if listener.has_sources() => {
            let note = "the listener has `sources`; test a peer's address by --address";
            answer.notes.push(note.to_owned());
        }
        _ => {}
    }
    answer.outcome = if is_tls {
        explainer.explain_client_hello(listener, &mut answer)?
    } else {
        explainer.explain_connect(listener, &mut answer)?
    };
    Ok(answer)
}

fn select_listener<'a>(
    state: &ExplainState<'a>,
    question: &Question,
) -> Result<&'a (String, ListenerRules), String> {
    let all = state.listeners.iter();
    let names = |listeners: Vec<&(String, ListenerRules)>| {
        let names: Vec<_> = listeners.iter().map(|(name, _)| name.as_str()).collect();
        names.join(", ")
    };
    if let Some(wanted) = &question.listener {
        let found = all.clone().find(|(name, _)| name == wanted);
        return found.ok_or_else(|| {
            let names = names(all.collect());
            format!("unknown listener {wanted:?}; write one of {names}")
        });
    }
    let is_tls = match (&question.to, &question.sni) {
        (Some(_), _) => false,
        (None, Some(_)) => true,
        (None, None) => {
            return Err(NO_TARGET.to_owned());
        }
    };
    let fitting: Vec<_> = all.filter(|(_, of)| of.is_passthrough() == is_tls).collect();
    match (&fitting[..], is_tls) {
        ([], true) => Err("there is no TLS listener; write --from and --to".to_owned()),
        ([], false) => Err("there is no HBONE listener; write --sni instead of --to".to_owned()),
        ([_, _, ..], true) => {
            let names = names(fitting);
            Err(format!("several TLS listeners; write --listener with one of {names}"))
        }
        ([first, ..], _) => Ok(first),
    }
}

/// Question with the state that it is evaluated against.
#[derive(Clone, Copy)]
struct Explainer<'a> {
    state: &'a ExplainState<'a>,
    question: &'a Question,
    /// Headers of gateways that the tunnel has passed.
    forwarded: Option<&'a Forwarded>,
}

impl Explainer<'_> {
    /// Explains a connection to a TLS listener.
    fn explain_client_hello(
        self,
        listener: &ListenerRules,
        answer: &mut Answer,
    ) -> Result<Outcome, String> {
        let question = self.question;
        let has_identity = question.from.is_some() || question.cluster.is_some();
        let has_header = question.origin.is_some() || self.forwarded.is_some();
        if has_identity || question.to.is_some() || has_header {
            let what = "peers of a TLS listener present no certificate and send no CONNECT; write \
                        --sni and --alpn, and neither --from, --cluster, --to, --origin, --source \
                        nor --via";
            return Err(what.to_owned());
        }
        let peer = Peer::unauthenticated(question.address(), Arc::default(), None);
        answer.peer = rules::peer(&peer);
        let offers_istio = question.alpn.iter().any(|one| is_istio_alpn(one.as_bytes()));
        let hello = ClientHello::without_bytes(question.sni.as_deref(), offers_istio);
        let target = listener.target(&hello);
        let unrouted = |reason| {
            let names = listener.server_names();
            rules::unrouted(self.state.snapshot, &hello, reason, names.as_deref())
        };
        let requested = target.as_ref().map(|target| target.authority.clone());
        let requested = requested.map_err(|reason| unrouted(*reason));
        let (snapshot, room) = (self.state.snapshot, self.state.room());
        let decided = establish::decide_passthrough(snapshot, &peer, room, || Ok(()), target);
        let lookup = self.describe(&peer, requested, &decided);
        let from = Some(listener.describe_match(hello.sni.as_deref()));
        answer.lookups.extend(lookup.map(|lookup| LookupRow { from, ..lookup }));
        Ok(self.pick(&peer, decided, RejectionForm::Alert, answer))
    }

    /// Authenticates the peer with the identity of the question, or returns the outcome.
    fn authenticate(
        self,
        listener: Arc<Listener>,
        answer: &mut Answer,
    ) -> Result<Result<Peer, Outcome>, String> {
        let identity = self.identity()?;
        let issuer = self.issuer(&identity.trust_domain)?;
        let (address, snapshot) = (self.question.address(), self.state.snapshot);
        let peer = Peer::authenticated(identity.clone(), issuer, address, listener, snapshot);
        answer.peer = rules::identity(&identity, &peer, snapshot);
        Ok(match peer {
            Ok(peer) => self.refused_issuer(&peer, answer).map_or(Ok(peer), Err),
            Err(refusal) => Err(Outcome::handshake_rejected(refusal)),
        })
    }

    /// Returns the outcome of the decision and of the pick after it.
    fn pick<T>(
        self,
        peer: &Peer,
        decided: Result<(Permit, T), Rejection>,
        form: RejectionForm,
        answer: &mut Answer,
    ) -> Outcome {
        match decided {
            Err(rejection) => Outcome::refused(rejection.reason, form),
            Ok((permit, _)) => endpoints::run(self, peer, &permit, form, answer),
        }
    }

    fn explain_connect(
        self,
        listener: &ListenerRules,
        answer: &mut Answer,
    ) -> Result<Outcome, String> {
        let origin = self.question.origin()?;
        let Some(to) = &self.question.to else {
            return Err("an HBONE listener routes by an authority; write --to with one, such as \
                        `--to echo.app.svc.cluster.local:80`"
                .to_owned());
        };
        // The answer has judged `sources` already, if the question has an address.
        let listener = Arc::new(Listener::open_to_all(listener));
        let peer = match self.authenticate(listener, answer)? {
            Ok(peer) => peer,
            Err(refused) => return Ok(refused),
        };
        let snapshot = self.state.snapshot;
        let first_peer = rules::first_peer(snapshot, &peer, self.question.source.as_deref());
        answer.notes.extend(first_peer);
        let authority = Authority::parse(to);
        let forwarded = self.forwarded.cloned().map(Box::new);
        let target = authority.clone().map(|authority| Target { authority, origin, forwarded });
        let decided = self.decide_connect(&peer, target.map_err(|_| Reason::BadAuthority));
        let requested = authority.map_err(|_| rules::no_authority(snapshot, to));
        answer.lookups.extend(self.describe(&peer, requested, &decided));
        let row = answer.lookups.last_mut().and_then(|lookup| lookup.route.as_mut());
        if let (Some(row), Ok((_, route_by))) = (row, &decided) {
            row.route_by = route_by.to_string();
        }
        Ok(match decided {
            Ok((permit, RouteBy::Sni)) => self.explain_sni_routing(&peer, &permit, answer),
            Ok((permit, RouteBy::Strict)) => self.explain_strict_sni(&peer, permit, answer),
            decided => {
                if decided.is_ok() && self.question.sni.is_some() {
                    let note = "the server name inside this tunnel is not evaluated";
                    answer.notes.push(note.to_owned());
                }
                self.pick(&peer, decided, RejectionForm::Status, answer)
            }
        })
    }

    /// Explains a tunnel that is answered and then routed by the server name of the TLS inside
    /// it.
    fn explain_sni_routing(self, peer: &Peer, outer: &Permit, answer: &mut Answer) -> Outcome {
        let Some(name) = &self.question.sni else {
            return Outcome {
                description: "answered by 200, and then routed by the server name of the TLS \
                              inside the tunnel; add --sni to see the target"
                    .to_owned(),
                ..Outcome::opened(RejectionForm::Reset)
            };
        };
        let hello = ClientHello::without_bytes(Some(name), false);
        let target = sni::target(outer, hello.sni.as_deref());
        let unrouted = |reason| rules::unrouted(self.state.snapshot, &hello, reason, None);
        let requested = target.as_ref().map(|target| target.authority.clone());
        let requested = requested.map_err(|reason| unrouted(*reason));
        let decided = self.decide_connect(peer, target);
        let lookup = self.describe(peer, requested, &decided);
        let from = Some("by the server name of the TLS inside the tunnel".to_owned());
        answer.lookups.extend(lookup.map(|lookup| LookupRow { from, ..lookup }));
        self.pick(peer, decided, RejectionForm::Reset, answer)
    }

    /// Explains a tunnel that is dialled and answered, and then checked against the server name
    /// inside it.
    fn explain_strict_sni(self, peer: &Peer, permit: Permit, answer: &mut Answer) -> Outcome {
        let outcome = endpoints::run(self, peer, &permit, RejectionForm::Status, answer);
        let endpoint = permit.route().endpoints.endpoints.first().cloned();
        let (true, Some(endpoint)) = (outcome.opened, endpoint) else {
            return outcome;
        };
        let Some(name) = &self.question.sni else {
            let note = "the server name of the TLS inside the tunnel must be one of the service's; \
                        add --sni to see whether one is";
            answer.notes.push(note.to_owned());
            return outcome;
        };
        let (grant, name) = (permit.into_grant(endpoint), normalise(name));
        let snapshot = self.state.snapshot;
        match policy::check_server_name(snapshot, peer, &grant, name.as_deref()) {
            Ok(()) => outcome,
            Err(reason) => {
                Outcome { or: outcome.or, ..Outcome::refused(reason, RejectionForm::Reset) }
            }
        }
    }

    fn decide_connect(
        self,
        peer: &Peer,
        target: Result<Target, Reason>,
    ) -> Result<(Permit, RouteBy), Rejection> {
        let (snapshot, room) = (self.state.snapshot, self.state.room());
        establish::decide_connect(snapshot, peer, room, || Some(OWN_HASH), target)
    }

    /// Describes the decision about an authority, or returns the row of a request without one. None
    /// if memory ran short before.
    fn describe<T>(
        self,
        peer: &Peer,
        requested: Result<Authority, LookupRow>,
        decided: &Result<(Permit, T), Rejection>,
    ) -> Option<LookupRow> {
        let state = self.state;
        let (route, rejection) = match decided {
            Ok((permit, _)) => (Some(permit.route()), None),
            Err(rejection) => (rejection.route.as_deref(), Some(rejection)),
        };
        let reason = rejection.map(|rejection| rejection.reason);
        let requested = match requested {
            _ if reason == Some(Reason::BuffersFull) => return None,
            Ok(requested) => requested,
            Err(row) => return Some(row),
        };
        let rule = match (route, reason) {
            (Some(route), _) => rules::rule(state, peer, route, rejection),
            (None, Some(Reason::GatewayLoop)) => rules::gateway_loop(self.forwarded),
            (None, Some(Reason::BadSource)) => rules::malformed_first_peer(),
            (None, _) => rules::describe_unknown(state, peer, &requested),
        };
        let (requested, from) = (requested.to_string(), None);
        let route = route.map(|route| rules::route(state.snapshot, peer, route));
        Some(LookupRow { requested, from, route, rule })
    }

    /// Refuses an issuer that may not sign for the peer's trust domain, as the handshake does.
    /// Without `trust.clusters` the question names no issuer, and a permitted one is assumed.
    fn refused_issuer(self, peer: &Peer, answer: &mut Answer) -> Option<Outcome> {
        let (trust, domain) = (&self.state.snapshot.trust, &peer.source.trust_domain);
        let permitted = trust.domain_issuers(domain)?;
        let has_cluster = |spki| trust.issuers().any(|(_, known)| known == spki);
        let is_permitted = match &peer.issuer {
            Some(issuer) => permitted.contains(&issuer.spki),
            None => permitted.iter().any(|spki| !has_cluster(spki)),
        };
        if is_permitted {
            answer.notes.extend((!trust.has_issuers()).then(|| {
                format!("the certificate is assumed to be of one of the `issuers` of {domain}")
            }));
            return None;
        }
        answer.peer.cluster = None;
        answer.peer.description = format!(
            "rejected in the handshake: its issuer is not one of the `issuers` of {domain} in \
             `trust.domains`; add it there, or select another cluster by --cluster"
        );
        let refusal = HandshakeRefusal::UntrustedIssuer;
        Some(Outcome::handshake_rejected(refusal))
    }

    /// Returns an issuer of the cluster in the question, if possible one that may sign for the
    /// trust domain; none without a cluster.
    fn issuer(self, domain: &str) -> Result<Option<Arc<Issuer>>, String> {
        let trust = &self.state.snapshot.trust;
        let Some(wanted) = &self.question.cluster else {
            return Ok(None);
        };
        if !trust.has_issuers() {
            return Err(format!(
                "cannot apply --cluster {wanted:?}: without `trust.clusters` the trust domain \
                 determines the cluster; omit --cluster"
            ));
        }
        let permitted = trust.domain_issuers(domain);
        let may_sign = |spki: &SpkiHash| permitted.is_none_or(|list| list.contains(spki));
        let own = trust.issuers().filter(|(name, _)| name == wanted);
        if let Some((_, spki)) = own.max_by_key(|(_, spki)| may_sign(spki)) {
            let (spki, subject) = (*spki, Box::default());
            return Ok(Some(Arc::new(Issuer { spki, subject })));
        }
        let names: BTreeSet<_> = trust.issuers().map(|(name, _)| name).collect();
        let names: Vec<_> = names.into_iter().collect();
        Err(format!(
            "`trust.clusters` has no {wanted:?}; write --cluster with one of {}, or omit it for an \
             issuer that none has",
            names.join(", ")
        ))
    }

    fn identity(self) -> Result<Identity, String> {
        const HOW: &str = "write --from with one, such as `--from \
                           spiffe://west.local/ns/shop/sa/checkout`";
        let Some(uri) = &self.question.from else {
            return Err(format!("the peer has an identity; {HOW}"));
        };
        let identity = Identity::parse(uri, SystemTime::UNIX_EPOCH);
        identity.ok_or_else(|| format!("{uri:?} is not a workload identity; {HOW}"))
    }
}

/// Returns the mode in which Istio's policies are evaluated.
fn enforcement(snapshot: &Snapshot) -> &'static str {
    match snapshot.enforcement {
        Enforcement::Off => "off",
        Enforcement::Audit => "audit",
        Enforcement::Enforce => "enforce",
    }
}
