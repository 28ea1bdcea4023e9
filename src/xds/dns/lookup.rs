//! DNS lookups with hickory. Its cache is not used, because the schedule decides when to look
//! up a name again.

use std::net::SocketAddr;
use std::time::Duration;

use hickory_resolver::config::{NameServerConfig, ResolverConfig};
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::rr::{Name, RecordType};
use hickory_resolver::{ResolverBuilder, TokioResolver};
use tokio::join;
use tokio::time::{Instant, timeout};

use super::schedule::{Answers, FamilyAnswer};

/// Deadline of a lookup, all servers and retries together.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(10);
/// Deadline for one server, short enough to try another one within [`LOOKUP_TIMEOUT`].
const SERVER_TIMEOUT: Duration = Duration::from_secs(2);
/// Lifetime of a resolver, after which `/etc/resolv.conf` is read again.
const RESOLVER_LIFETIME: Duration = Duration::from_secs(60);

/// Resolver and the configured servers.
pub(super) struct DnsClient {
    servers: Vec<SocketAddr>,
    resolver: Option<(Instant, TokioResolver)>,
}

impl DnsClient {
    /// Uses these servers, or those of the system if the list is empty.
    pub(super) fn new(servers: Vec<SocketAddr>) -> Self {
        Self { servers, resolver: None }
    }

    /// Looks up all IPv4 and IPv6 addresses of a name. The search list of the system is not
    /// used, because hostnames of a mesh are fully qualified.
    pub(super) fn look_up(&mut self, name: &str) -> impl Future<Output = Answers> + use<> {
        let name = Name::from_ascii(name).map(|mut name| {
            name.set_fqdn(true);
            name
        });
        let name = name.map_err(|error| error.to_string());
        let prepared = name.and_then(|name| Ok((self.resolver()?, name)));
        async move {
            match prepared {
                Ok((resolver, name)) => {
                    let v4 = look_up_family(&resolver, name.clone(), RecordType::A);
                    let v6 = look_up_family(&resolver, name, RecordType::AAAA);
                    join!(v4, v6).into()
                }
                Err(error) => [Err(error.clone()), Err(error)],
            }
        }
    }

    fn resolver(&mut self) -> Result<TokioResolver, String> {
        if let Some((since, resolver)) = &self.resolver
            && since.elapsed() < RESOLVER_LIFETIME
        {
            return Ok(resolver.clone());
        }
        let built = self.builder().and_then(|mut builder| {
            let options = builder.options_mut();
            options.timeout = options.timeout.min(SERVER_TIMEOUT);
            builder.build()
        });
        let resolver = built.map_err(|error| error.to_string())?;
        self.resolver = Some((Instant::now(), resolver.clone()));
        Ok(resolver)
    }

    fn builder(&self) -> Result<ResolverBuilder<TokioRuntimeProvider>, NetError> {
        if self.servers.is_empty() {
            return TokioResolver::builder_tokio();
        }
        let server = |address: &SocketAddr| {
            let mut server = NameServerConfig::udp_and_tcp(address.ip());
            for connection in &mut server.connections {
                connection.port = address.port();
            }
            server
        };
        let servers = self.servers.iter().map(server).collect();
        let config = ResolverConfig::from_parts(None, Vec::new(), servers);
        let provider = TokioRuntimeProvider::default();
        Ok(TokioResolver::builder_with_config(config, provider))
    }
}

/// Looks up the addresses of one family. An answer without records is not an error.
async fn look_up_family(
    resolver: &TokioResolver,
    name: Name,
    kind: RecordType,
) -> Result<FamilyAnswer, String> {
    resolver.clear_lookup_cache(name.clone(), kind);
    let looked_up = timeout(LOOKUP_TIMEOUT, resolver.lookup(name, kind)).await;
    let lookup = match looked_up {
        Err(_) => return Err("no answer within 10 s".to_owned()),
        Ok(Err(error)) if error.is_no_records_found() => return Ok(FamilyAnswer::default()),
        Ok(Err(error)) => return Err(error.to_string()),
        Ok(Ok(lookup)) => lookup,
    };
    let answers = lookup.answers();
    // Each link of a CNAME chain has a TTL of its own.
    let ttl = answers.iter().map(|record| record.ttl).min();
    let addresses = answers.iter().filter_map(|record| record.data.ip_addr());
    Ok(FamilyAnswer {
        addresses: addresses.map(|ip| ip.to_canonical()).collect(),
        ttl: Duration::from_secs(ttl.unwrap_or_default().into()),
    })
}
